//! The numbers of the live stream, judged one by one.

/// The kind of a live message, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LivePosition {
    /// The one that comes next, or the first at all.
    Next,
    /// One that a replay has brought already.
    Known,
    /// One after a hole.
    AfterGap,
    /// Not above the one before it on the same connection: the engine began anew.
    Fell,
}

/// Judges a live message: `next` is what the consumer is to get next, `last` came last on this connection.
pub(super) fn judge(sequence: u64, next: Option<u64>, last: Option<u64>) -> LivePosition {
    if last.is_some_and(|last| sequence <= last) {
        return LivePosition::Fell;
    }
    match next {
        Some(next) if sequence > next => LivePosition::AfterGap,
        Some(next) if sequence < next => LivePosition::Known,
        _ => LivePosition::Next,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_judged_by_what_came_before() {
        assert_eq!(judge(7, None, None), LivePosition::Next, "the first may have any number");
        assert_eq!(judge(7, Some(7), Some(6)), LivePosition::Next);
        assert_eq!(judge(9, Some(7), Some(6)), LivePosition::AfterGap);
        assert_eq!(judge(7, Some(10), Some(6)), LivePosition::Known, "a replay was faster");
        assert_eq!(judge(7, Some(10), None), LivePosition::Known);
        assert_eq!(judge(0, Some(7), Some(6)), LivePosition::Fell);
        assert_eq!(judge(6, Some(7), Some(6)), LivePosition::Fell, "no engine says a number twice");
    }
}
