//! Classifies etcd's errors: the status code is ambiguous, so the message decides.

use tonic::{Code, Status};

use crate::error::{Kind, MembershipError, Stage};

/// Whether the call was refused for its token alone: a new one helps, and nothing was carried out.
pub(super) fn token_is_old(status: &Status) -> bool {
    let said = status.message();
    said.contains("invalid auth token") || said.contains("revision of auth store is old")
}

/// Whether the endpoint is at fault and another may do better.
pub(super) fn endpoint_is_down(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded)
}

/// A refusal in our words.
pub(super) fn error(stage: Stage, endpoint: &str, status: &Status) -> MembershipError {
    let (kind, remedy) = meaning(status.code(), status.message());
    let said = if status.message().is_empty() { status.code().description() } else { status.message() };
    MembershipError::new(kind, stage, format!("etcd at {endpoint}: {said}; {remedy}"))
}

fn meaning(code: Code, said: &str) -> (Kind, &'static str) {
    let has = |part: &str| said.contains(part);
    if has("lease not found") {
        return (Kind::LeaseLost, "it has ended: take a new one");
    }
    if has("has been compacted") {
        return (Kind::Compacted, "list anew");
    }
    let unnamed = has("user name is empty") || has("user name not found");
    if unnamed || has("authentication failed") || has("invalid auth token") || has("permission denied") {
        return (Kind::Denied, "check user, password and the user's roles");
    }
    if has("database space exceeded") {
        return (Kind::Unavailable, "compact and defragment it, then disarm its alarm");
    }
    match code {
        Code::Unauthenticated | Code::PermissionDenied => {
            (Kind::Denied, "check user, password and the user's roles")
        }
        Code::DeadlineExceeded => (Kind::TimedOut, "see whether it is overloaded or has lost its quorum"),
        Code::InvalidArgument | Code::NotFound | Code::OutOfRange | Code::Unimplemented => {
            (Kind::Invalid, "etcd 3.4 or newer is needed; please report this")
        }
        _ => (Kind::Unavailable, "see whether it runs and has a quorum"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_etcd_become_kinds() {
        let kind = |code, said: &str| error(Stage::Read, "e", &Status::new(code, said)).kind;
        assert_eq!(kind(Code::NotFound, "etcdserver: requested lease not found"), Kind::LeaseLost);
        let compacted = "etcdserver: mvcc: required revision has been compacted";
        assert_eq!(kind(Code::OutOfRange, compacted), Kind::Compacted);
        assert_eq!(kind(Code::InvalidArgument, "etcdserver: user name is empty"), Kind::Denied);
        assert_eq!(kind(Code::PermissionDenied, "etcdserver: permission denied"), Kind::Denied);
        assert_eq!(kind(Code::Unavailable, "etcdserver: no leader"), Kind::Unavailable);
        assert_eq!(kind(Code::DeadlineExceeded, ""), Kind::TimedOut);
        assert_eq!(kind(Code::InvalidArgument, "etcdserver: key is not provided"), Kind::Invalid);
        let full = "etcdserver: mvcc: database space exceeded";
        assert_eq!(kind(Code::ResourceExhausted, full), Kind::Unavailable);
    }

    #[test]
    fn only_old_tokens_are_renewed() {
        assert!(token_is_old(&Status::unauthenticated("etcdserver: invalid auth token")));
        assert!(!token_is_old(&Status::permission_denied("etcdserver: permission denied")));
        assert!(endpoint_is_down(&Status::unavailable("")) && !endpoint_is_down(&Status::not_found("")));
    }
}
