//! The module `mooncake._baton` of Python. Each function here unpacks arguments, releases the interpreter's lock and
//! calls [`crate::engine`] or [`crate::store`]. It logs a failure under its name, and returns Mooncake's number for it.

mod notices;
mod store;
mod transfer;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _baton {
    #[pymodule_export]
    use super::notices::TransferNotify;
    #[pymodule_export]
    use super::store::Store;
    #[pymodule_export]
    use super::transfer::TransferEngine;
}

/// Says something through Python's own `logging`. A logger that raises must not turn a failure into another.
fn log(py: Python<'_>, logger: &str, level: &str, text: &str) {
    let said = py.import("logging").and_then(|logging| {
        let logger = logging.call_method1("getLogger", (logger,))?;
        logger.call_method1(level, ("%s", text))
    });
    if let Err(error) = said {
        error.write_unraisable(py, None);
    }
}
