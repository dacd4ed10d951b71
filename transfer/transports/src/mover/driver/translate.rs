//! From the words of the port to those of the core.

use baton_transfer as core;
use baton_transfer::{Input, PathNumber, SliceTicket};

use crate::mover::{Completion, Fault, PathEnd, PathId};

/// The path that a completion is of.
pub(super) fn path_of(completion: &Completion) -> PathId {
    match completion {
        Completion::Done { path, .. }
        | Completion::Failed { path, .. }
        | Completion::Broken { path, .. }
        | Completion::Closed { path, .. }
        | Completion::PathCapacity { path }
        | Completion::Notified { path, .. } => *path,
    }
}

/// Translates a completion to the core's input, with the text of the transport's fault.
pub(super) fn translate(completion: Completion) -> (Input, Option<String>) {
    let number = |path: PathId| PathNumber(path.0);
    match completion {
        Completion::Done { path, ticket } => {
            (Input::SliceDone { path: number(path), ticket: SliceTicket(ticket) }, None)
        }
        Completion::Failed { path, ticket, fault } => {
            let (fault, text) = meaning(fault);
            (Input::Failed { path: number(path), ticket: SliceTicket(ticket), fault }, Some(text))
        }
        Completion::Broken { path, fault } => {
            let (fault, text) = meaning(fault);
            (Input::PathBroken { path: number(path), fault }, Some(text))
        }
        Completion::Closed { path, end } => {
            let end = match end {
                PathEnd::Fenced => core::PathEnd::Fenced,
                PathEnd::PeerUnknown => core::PathEnd::PeerUnknown,
            };
            (Input::PathClosed { path: number(path), end }, None)
        }
        Completion::PathCapacity { path } => (Input::PathRoom { path: number(path) }, None),
        Completion::Notified { path, ticket } => {
            (Input::Notified { path: number(path), ticket: SliceTicket(ticket) }, None)
        }
    }
}

/// Translates a fault to the core's fault and its text.
pub(super) fn meaning(fault: Fault) -> (core::Fault, String) {
    match fault {
        Fault::Path(text) => (core::Fault::Path, text),
        Fault::Silent(text) => (core::Fault::Silent, text),
        Fault::Stale(text) => (core::Fault::Stale, text),
        Fault::Invalid(text) => (core::Fault::Invalid, text),
        Fault::Corrupt(text) => (core::Fault::Corrupt, text),
    }
}
