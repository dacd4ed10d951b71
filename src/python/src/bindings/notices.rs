//! Notices between engines, as Python has them.

use pyo3::prelude::*;

use crate::engine::Note;

/// A notice.
#[pyclass(module = "mooncake.engine", skip_from_py_object)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TransferNotify {
    /// The sender or the purpose.
    #[pyo3(get, set)]
    name: String,
    /// The content.
    #[pyo3(get, set)]
    msg: String,
}

#[pymethods]
impl TransferNotify {
    #[new]
    #[pyo3(signature = (name = String::new(), msg = String::new()))]
    fn new(name: String, msg: String) -> Self {
        Self { name, msg }
    }
}

impl TransferNotify {
    pub(super) fn note(&self) -> Note {
        Note { name: self.name.clone(), msg: self.msg.clone() }
    }
}

impl From<Note> for TransferNotify {
    fn from(note: Note) -> Self {
        Self { name: note.name, msg: note.msg }
    }
}
