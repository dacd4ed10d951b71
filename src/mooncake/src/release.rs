//! The release of Mooncake that this crate speaks with. Its messages spell out every field of every struct, so one more
//! field anywhere is another language: there is nothing to negotiate, only a release to name.

use crate::error::{Kind, MooncakeError};

/// The release whose messages are spoken here.
pub const RELEASE: &str = "0.3.13.post1";

/// The package on PyPI whose files were tried.
pub const PACKAGE: &str = "mooncake-transfer-engine-non-cuda";

/// The version that the master of that release reports.
pub(crate) const STORE_VERSION: &str = "2.0.0";

/// The refusal of a peer of another release.
pub(crate) fn other_release(stage: &'static str, peer: &str, what: &str) -> MooncakeError {
    let message = format!(
        "{what}; this program speaks the messages of Mooncake {RELEASE} only: run that release ({PACKAGE})"
    );
    MooncakeError::new(Kind::Release, stage, peer, message)
}
