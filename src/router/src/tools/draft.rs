//! The parts of a call that a reader has found and not yet handed on.

/// News of the call that is being read: its name once, then its arguments in pieces, then its end.
#[derive(Debug, Default)]
pub(super) struct Draft {
    name: Option<String>,
    arguments: String,
    ended: bool,
}

impl Draft {
    pub(super) fn name(&mut self, name: String) {
        self.name = Some(name);
    }

    /// Moves the next piece of the arguments here.
    pub(super) fn arguments(&mut self, piece: &mut String) {
        self.arguments.push_str(piece);
        piece.clear();
    }

    /// Name and arguments at once.
    pub(super) fn whole(&mut self, name: String, mut arguments: String) {
        self.name(name);
        self.arguments(&mut arguments);
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    pub(super) fn take_name(&mut self) -> Option<String> {
        self.name.take()
    }

    /// The arguments since they were last taken.
    pub(super) fn new_arguments(&mut self) -> &mut String {
        &mut self.arguments
    }

    pub(super) fn take_end(&mut self) -> bool {
        std::mem::take(&mut self.ended)
    }
}
