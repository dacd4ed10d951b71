//! Merges the content of EndpointSlices. No network access here.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::directory::{Board, listed};
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::member::{ADDRESSES_MAX, Member, MemberRole};
use crate::view::{ListedMember, Revision};

/// Slices of one service that are kept.
pub(super) const SLICES_MAX: usize = 1024;
/// The label of a service that says what its members do; Kubernetes copies it to the slices.
const ROLE_LABEL: &str = "baton.dev/role";

#[derive(Deserialize)]
struct Page {
    metadata: PageMeta,
    items: Option<Vec<Slice>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMeta {
    resource_version: String,
    #[serde(default, rename = "continue")]
    further: Option<String>,
}

#[derive(Deserialize)]
struct Line {
    r#type: String,
    object: serde_json::Value,
}

#[derive(Debug, Deserialize)]
struct Slice {
    metadata: SliceMeta,
    endpoints: Option<Vec<Endpoint>>,
    ports: Option<Vec<Port>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SliceMeta {
    #[serde(default)]
    name: String,
    resource_version: String,
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
    hostname: Option<String>,
    target_ref: Option<Target>,
    node_name: Option<String>,
    zone: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Target {
    #[serde(default)]
    name: String,
    #[serde(default)]
    uid: String,
}

#[derive(Debug, Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    code: u16,
    #[serde(default)]
    message: String,
}

/// The effect of a line of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Happened {
    /// Members may have changed.
    Change,
    /// Only time has passed.
    Nothing,
}

/// The slices of one service.
#[derive(Debug)]
pub(super) struct Slices {
    port: Option<String>,
    role: MemberRole,
    known: BTreeMap<String, Slice>,
    left_out: usize,
    revision: Option<String>,
}

/// A listing that is being read, page by page.
#[derive(Debug, Default)]
pub(super) struct Listing {
    known: BTreeMap<String, Slice>,
    left_out: usize,
    revision: String,
}

fn unread(stage: Stage, e: &serde_json::Error) -> MembershipError {
    let text =
        format!("what Kubernetes says is no EndpointSlice: {e}; see whether it serves discovery.k8s.io/v1");
    MembershipError::new(Kind::Corrupt, stage, text)
}

fn keep(known: &mut BTreeMap<String, Slice>, left_out: &mut usize, slice: Slice) {
    if known.len() < SLICES_MAX || known.contains_key(&slice.metadata.name) {
        known.insert(slice.metadata.name.clone(), slice);
    } else {
        *left_out += slice.endpoints.map_or(0, |endpoints| endpoints.len());
    }
}

impl Listing {
    /// Takes one page; the token to ask for the next with, if there is one.
    pub(super) fn page(&mut self, text: &[u8]) -> Result<Option<String>> {
        let page: Page = serde_json::from_slice(text).map_err(|e| unread(Stage::Read, &e))?;
        for slice in page.items.into_iter().flatten() {
            keep(&mut self.known, &mut self.left_out, slice);
        }
        self.revision = page.metadata.resource_version;
        Ok(page.metadata.further.filter(|token| !token.is_empty()))
    }
}

impl Slices {
    /// Of a service whose members do `role` unless it says otherwise, and are reached at `port`.
    pub(super) const fn new(port: Option<String>, role: MemberRole) -> Self {
        Self { port, role, known: BTreeMap::new(), left_out: 0, revision: None }
    }

    /// Where to go on watching; none: everything is to be listed.
    pub(super) fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The server no longer keeps what came after the revision.
    pub(super) fn forget_revision(&mut self) {
        self.revision = None;
    }

    pub(super) fn begin(&self) -> Listing {
        Listing::default()
    }

    pub(super) fn finish(&mut self, listing: Listing) {
        (self.known, self.left_out) = (listing.known, listing.left_out);
        self.revision = Some(listing.revision);
    }

    /// Takes one line of a watch.
    ///
    /// # Errors
    /// [`Kind::Compacted`]: list anew.
    pub(super) fn happened(&mut self, line: &[u8]) -> Result<Happened> {
        let unread = |e: serde_json::Error| unread(Stage::Watch, &e);
        let line: Line = serde_json::from_slice(line).map_err(unread)?;
        if line.r#type == "ERROR" {
            let refusal: Refusal = serde_json::from_value(line.object).map_err(unread)?;
            let (kind, remedy) = match refusal.code {
                410 => (Kind::Compacted, "list anew"),
                401 | 403 => (Kind::Denied, "let the account get, list and watch endpointslices"),
                _ => (Kind::Unavailable, "watch anew"),
            };
            let text = format!("Kubernetes ends the watch: {} {}; {remedy}", refusal.code, refusal.message);
            return Err(MembershipError::new(kind, Stage::Watch, text));
        }
        let slice: Slice = serde_json::from_value(line.object).map_err(unread)?;
        self.revision = Some(slice.metadata.resource_version.clone());
        match line.r#type.as_str() {
            "ADDED" | "MODIFIED" => keep(&mut self.known, &mut self.left_out, slice),
            "DELETED" => {
                self.known.remove(&slice.metadata.name);
            }
            // Bookmarks, and whatever a later version may tell.
            _ => return Ok(Happened::Nothing),
        }
        Ok(Happened::Change)
    }

    /// Writes the merged content of the slices to `board`.
    pub(super) fn write(&self, board: &Board) {
        let (members, wrong) = self.members();
        let revision: Revision = self.revision.as_deref().unwrap_or_default().into();
        board.replace(members, revision, self.left_out + wrong);
    }

    /// The members, and how many endpoints are none. A pod stands in one slice for each family of addresses, and for
    /// a moment perhaps in two of one family: what they say is put together.
    fn members(&self) -> (Vec<ListedMember>, usize) {
        let mut together: BTreeMap<String, (Member, &str)> = BTreeMap::new();
        let mut wrong = 0;
        for slice in self.known.values() {
            let Some(port) = self.port_of(slice) else {
                wrong += slice.endpoints.as_ref().map_or(0, Vec::len);
                continue;
            };
            for endpoint in slice.endpoints.iter().flatten().filter(|endpoint| endpoint.is_ready()) {
                let member = endpoint.member(port, self.role_of(slice));
                let known = together.entry(member.name.clone()).or_insert_with(|| {
                    (Member { addresses: Vec::new(), ..member.clone() }, &slice.metadata.resource_version)
                });
                for address in member.addresses {
                    if !known.0.addresses.contains(&address) && known.0.addresses.len() < ADDRESSES_MAX {
                        known.0.addresses.push(address);
                    }
                }
            }
        }
        let each = together.into_values().filter_map(|(member, revision)| {
            let listed = listed(member, &revision.into());
            if let Err(error) = &listed {
                wrong += 1;
                tracing::warn!(why = error.text, "an endpoint that is no member is left out");
            }
            listed.ok()
        });
        let members = each.collect();
        (members, wrong)
    }

    fn port_of(&self, slice: &Slice) -> Option<u16> {
        let ports = slice.ports.as_deref().unwrap_or_default();
        let wanted = |port: &&Port| match &self.port {
            Some(name) => port.name.as_ref() == Some(name),
            None => true,
        };
        ports.iter().find(wanted)?.port
    }

    fn role_of(&self, slice: &Slice) -> MemberRole {
        let label = slice.metadata.labels.as_ref().and_then(|labels| labels.get(ROLE_LABEL));
        label.and_then(|word| MemberRole::parse(word).ok()).unwrap_or(self.role)
    }
}

impl Endpoint {
    /// Whether it takes work: what does not say counts as ready.
    fn is_ready(&self) -> bool {
        self.conditions.ready.unwrap_or(true) && !self.conditions.terminating.unwrap_or(false)
    }

    fn member(&self, port: u16, role: MemberRole) -> Member {
        let reached = |address: &String| match address.contains(':') {
            true => format!("[{address}]:{port}"),
            false => format!("{address}:{port}"),
        };
        let addresses: Vec<String> = self.addresses.iter().map(reached).collect();
        let pod = self.target_ref.as_ref().map(|target| target.name.clone()).filter(|name| !name.is_empty());
        let name = pod.or_else(|| self.hostname.clone()).or_else(|| addresses.first().cloned());
        let mut member = Member::new(name.unwrap_or_default(), role, addresses);
        let uid = self.target_ref.as_ref().map(|target| target.uid.clone()).filter(|uid| !uid.is_empty());
        let labels = [("zone", &self.zone), ("node", &self.node_name), ("uid", &uid)];
        member.labels =
            labels.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value.clone()?))).collect();
        member
    }
}

#[cfg(test)]
#[path = "slices_tests.rs"]
mod tests;
