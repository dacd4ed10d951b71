//! Notices between engines: a name and a message.

use pyo3::prelude::*;

/// A notice.
#[pyclass(module = "mooncake.engine", skip_from_py_object)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TransferNotify {
    /// Whose or what for.
    #[pyo3(get, set)]
    pub(super) name: String,
    /// What it says.
    #[pyo3(get, set)]
    pub(super) msg: String,
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
    /// As bytes: the length of the name, the name, the message.
    pub(super) fn encode(&self) -> Vec<u8> {
        let name = self.name.as_bytes();
        let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
        [&length.to_le_bytes(), name, self.msg.as_bytes()].concat()
    }

    /// From bytes; what is none of ours is all message.
    pub(super) fn decode(bytes: &[u8]) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let split = || {
            let (length, rest) = bytes.split_first_chunk::<4>()?;
            rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)
        };
        let (name, msg) = split().unwrap_or((b"", bytes));
        Self { name: text(name), msg: text(msg) }
    }
}
