//! A list of members in a file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::{FollowFuture, all_listed};
use crate::directory::Board;
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::member::{Member, MemberRole};
use crate::view::{ListedMember, Revision};

/// A file longer than this is no list of members.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// A file that lists members: TOML with `[[member]]` tables, or JSON (`.json`) with a list.
///
/// A file with any fault in it is refused as a whole, and what was known before stays; so is an empty one, which is
/// most often just being written. It is read, not asked for notices: those do not come from network file systems, and
/// a mounted ConfigMap is swapped by a link.
#[derive(Clone, Debug)]
pub struct FileSource {
    /// The path of the file.
    pub path: PathBuf,
    /// Time between two reads, µs.
    pub every_us: u64,
    /// The role of members for which the file gives none.
    pub role: MemberRole,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenMember {
    name: String,
    role: Option<MemberRole>,
    addresses: Vec<String>,
    #[serde(default)]
    epoch: u64,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    member: Vec<WrittenMember>,
}

impl FileSource {
    /// The file at `path`, read every second; who has no role there does both.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), every_us: 1_000_000, role: MemberRole::Both }
    }

    pub(super) fn following(self, board: Board, stop: CancellationToken) -> Result<FollowFuture> {
        if self.every_us == 0 {
            return Err(MembershipError::invalid("a file cannot be read every 0 µs; give a longer pause"));
        }
        Ok(Box::pin(self.follow(board, stop)))
    }

    async fn follow(self, board: Board, stop: CancellationToken) {
        let mut seen: Option<Vec<u8>> = None;
        let mut readings = 0u64;
        loop {
            match read(&self.path).await {
                Ok(text) if seen.as_ref() == Some(&text) => board.fresh(),
                Ok(text) => {
                    readings += 1;
                    match parse((&self.path, self.role), &text, &readings.to_string().into()) {
                        Ok(members) => {
                            board.replace(members, readings.to_string().into(), 0);
                            seen = Some(text);
                        }
                        Err(error) => board.stale(&error.to_string()),
                    }
                }
                Err(error) => board.stale(&error.to_string()),
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_micros(self.every_us)) => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

async fn read(path: &Path) -> Result<Vec<u8>> {
    let wrong = |why: String| {
        let text = format!("{}: {why}; give a readable list of members", path.display());
        MembershipError::new(Kind::Unavailable, Stage::Read, text)
    };
    let length = tokio::fs::metadata(path).await.map_err(|e| wrong(e.to_string()))?.len();
    if length > FILE_BYTES_MAX {
        return Err(wrong(format!("{length} bytes, at most {FILE_BYTES_MAX}")));
    }
    tokio::fs::read(path).await.map_err(|e| wrong(e.to_string()))
}

fn parse((path, role): (&Path, MemberRole), text: &[u8], revision: &Revision) -> Result<Vec<ListedMember>> {
    let wrong =
        |why: String| MembershipError::new(Kind::Corrupt, Stage::Read, format!("{}: {why}", path.display()));
    let written: Vec<WrittenMember> = if path.extension().is_some_and(|end| end == "json") {
        serde_json::from_slice(text).map_err(|e| wrong(format!("no list of members as JSON: {e}")))?
    } else {
        let text = std::str::from_utf8(text).map_err(|e| wrong(format!("no text: {e}")))?;
        // One that is just being written is empty for a moment.
        if text.trim().is_empty() {
            return Err(wrong("it is empty; write `member = []` where there is nobody".to_owned()));
        }
        toml::from_str::<Document>(text).map_err(|e| wrong(format!("no members as TOML: {e}")))?.member
    };
    let member = |one: WrittenMember| Member {
        name: one.name,
        role: one.role.unwrap_or(role),
        addresses: one.addresses,
        epoch: one.epoch,
        labels: one.labels,
    };
    all_listed(written.into_iter().map(member).collect(), revision).map_err(|e| wrong(e.text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_as(name: &str, text: &str) -> std::result::Result<Vec<String>, String> {
        let path = (Path::new(name), MemberRole::Decode);
        let members = parse(path, text.as_bytes(), &"1".into()).map_err(|e| e.to_string())?;
        Ok(members.into_iter().map(|one| one.member.name.clone()).collect())
    }

    #[test]
    fn toml_and_json_list_the_same_members() {
        let toml = "[[member]]\nname = \"p0\"\nrole = \"prefill\"\naddresses = [\"10.0.0.6:1\"]\nlabels = { zone = \"a\" }\n\
            [[member]]\nname = \"c\"\nrole = \"conductor\"\naddresses = [\"10.0.0.5:9090\", \"10.0.0.5:8080\"]\nepoch = 3\n";
        assert_eq!(read_as("m.toml", toml), Ok(vec!["p0".to_owned(), "c".to_owned()]));
        let json = r#"[{"name":"p0","role":"prefill","addresses":["a:1"]}]"#;
        assert_eq!(read_as("m.json", json), Ok(vec!["p0".to_owned()]));
        assert_eq!(read_as("m.toml", "member = []"), Ok(Vec::new()));
        assert_eq!(read_as("m.json", "[]"), Ok(Vec::new()));
    }

    #[test]
    fn who_has_no_role_in_the_file_has_that_of_all() {
        let roles = |role| {
            let text = "[[member]]\nname = \"a\"\naddresses = [\"a:1\"]\n[[member]]\nname = \"b\"\nrole = \"prefill\"\naddresses = [\"b:1\"]\n";
            let members = parse((Path::new("m.toml"), role), text.as_bytes(), &"1".into()).expect("a list");
            members.into_iter().map(|one| one.member.role).collect::<Vec<_>>()
        };
        assert_eq!(roles(MemberRole::Both), [MemberRole::Both, MemberRole::Prefill]);
        assert_eq!(roles(MemberRole::Decode), [MemberRole::Decode, MemberRole::Prefill]);
    }

    #[test]
    fn a_fault_anywhere_refuses_the_whole_file_and_says_where() {
        let told = |name: &str, text: &str| read_as(name, text).expect_err("wrong");
        let one = "[[member]]\nname = \"a\"\nrole = \"both\"\naddresses = [\"a:1\"]\n";
        assert!(told("m.toml", &format!("{one}{one}")).contains("'a' is listed twice"));
        assert!(told("m.toml", &one.replace("a:1", "a")).contains("member 'a': address 'a': no port"));
        assert!(told("m.toml", &format!("{one}adress = 1\n")).contains("adress"));
        assert!(told("m.toml", "member = 3").contains("m.toml"));
        assert!(told("m.json", "[{}]").contains("missing field"));
        assert!(told("m.toml", "\u{0}").contains("m.toml"));
        for empty in ["", " \n"] {
            assert!(told("m.toml", empty).contains("m.toml: it is empty; write `member = []`"));
            assert!(told("m.json", empty).contains("m.json"));
        }
    }
}
