//! The nodes that are attached: who they are, where their orders go, when they were last heard.

use std::collections::BTreeSet;
use std::sync::Arc;

use baton_scheduler::InstanceSpec;
use baton_types::{CostProfile, Epoch, InstanceId, Role};
use baton_wire::{PROTOCOL_VERSION, v1};
use tokio::sync::mpsc;

use super::instance_ids::InstanceIds;
use super::node_error::{AttachRefusal, MAX_NAME_BYTES, RoleError};

/// An attached node.
pub(super) struct Node {
    pub name: String,
    pub epoch: Epoch,
    pub role: Role,
    /// Nodes of one kind are alike in all that KV depends on.
    pub kind: u32,
    pub draining: bool,
    pub orders: mpsc::Sender<v1::ToNode>,
    pub outbox: Vec<v1::Order>,
    pub hello: v1::Hello,
    pub last_contact_us: u64,
    pub load: v1::NodeLoad,
}

impl Node {
    /// Where it stands, in a word. Its own report is as old as its last heartbeat, so what the conductor has given it
    /// since (`has_work`) counts too.
    pub(super) const fn state(&self, has_work: bool) -> &'static str {
        let idle = !has_work && self.load.holds == 0 && self.load.serving_reads == 0;
        match (self.draining, idle) {
            (false, _) => "serving",
            (true, false) => "draining",
            (true, true) => "drained",
        }
    }
}

/// The instances by number; `None` while one is away, or where a number is nobody's.
#[derive(Default)]
pub(super) struct Fleet {
    nodes: Vec<Option<Node>>,
    ids: InstanceIds,
}

impl Fleet {
    pub(super) fn get(&self, instance: InstanceId) -> Option<&Node> {
        self.nodes.get(instance.index())?.as_ref()
    }

    pub(super) fn get_mut(&mut self, instance: InstanceId) -> Option<&mut Node> {
        self.nodes.get_mut(instance.index())?.as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (InstanceId, &Node)> {
        let number = |at: usize| InstanceId(u32::try_from(at).unwrap_or(u32::MAX));
        self.nodes.iter().enumerate().filter_map(move |(at, node)| Some((number(at), node.as_ref()?)))
    }

    pub(super) fn by_name(&self, name: &str) -> Option<InstanceId> {
        self.ids.of(name).filter(|id| self.get(*id).is_some())
    }

    /// The name that a number had at a time, µs, if it is still known.
    pub(super) fn name_at(&self, instance: InstanceId, at_us: u64) -> Option<&str> {
        self.ids.owner(instance, at_us)
    }

    /// Whether some name left so long ago that it should be [forgotten](Self::forget).
    pub(super) fn overdue(&self, now_us: u64) -> bool {
        self.ids.overdue(now_us)
    }

    /// Whether a node of that name finds a number only if another name is [forgotten](Self::forget_oldest).
    pub(super) fn is_full(&self, name: &str) -> bool {
        self.ids.is_full(name)
    }

    /// Forgets the names that left long ago and whose numbers nothing speaks of; hands them out.
    pub(super) fn forget(&mut self, now_us: u64, referenced_instances: &BTreeSet<InstanceId>) -> Vec<String> {
        self.ids.forget(now_us, referenced_instances)
    }

    /// Forgets the name that left first of those.
    pub(super) fn forget_oldest(&mut self, referenced_instances: &BTreeSet<InstanceId>) -> Option<String> {
        self.ids.forget_oldest(referenced_instances)
    }

    /// The longest prompt and answer together that every engine that serves takes, and some decode instance holds in
    /// blocks of so many tokens. `None` where none serves.
    pub(super) fn longest_context_tokens(&self, block_tokens: u32) -> Option<u32> {
        let serves = |node: &&Node| !node.draining && node.hello.pass_tokens > 0;
        let serving = || self.iter().map(|(_, node)| node).filter(serves);
        let taken_tokens = serving().map(|node| node.hello.max_model_tokens).min()?;
        let block = u64::from(block_tokens.max(1));
        let decodes = serving().filter(|node| node.role.decodes());
        let held_tokens = decodes.map(|node| node.hello.capacity_tokens / block * block).max();
        let held_tokens = held_tokens.and_then(|tokens| u32::try_from(tokens).ok());
        Some(held_tokens.map_or(taken_tokens, |held_tokens| taken_tokens.min(held_tokens)))
    }

    /// Whether this is the present life of an attached node (I12).
    pub(super) fn is_current(&self, instance: InstanceId, epoch: Epoch) -> bool {
        self.get(instance).is_some_and(|node| node.epoch == epoch)
    }

    /// How peers reach an instance's KV.
    pub(super) fn peer(&self, instance: InstanceId) -> Option<v1::Peer> {
        let node = self.get(instance)?;
        Some(v1::Peer {
            instance: instance.0,
            epoch: node.epoch.0,
            kv_address: node.hello.kv_address.clone(),
            host: node.hello.host.clone(),
        })
    }

    /// Gives a node that was [checked](Self::check) a number and a new epoch.
    ///
    /// # Errors
    /// Too many instances are here.
    pub(super) fn admit(
        &mut self,
        hello: v1::Hello,
        orders: mpsc::Sender<v1::ToNode>,
        checked: (Role, CostProfile),
        now_us: u64,
    ) -> Result<InstanceSpec, AttachRefusal> {
        let (role, profile) = checked;
        let Some((id, epoch)) = self.ids.take(&hello.name, now_us) else {
            return Err(AttachRefusal::Full(hello.name));
        };
        if self.nodes.len() <= id.index() {
            self.nodes.resize_with(id.index() + 1, || None);
        }
        let kind = self.kind_of(&hello);
        let spec = InstanceSpec { kind, ..spec_of(&hello, (id, epoch), role, profile) };
        let load = v1::NodeLoad::default();
        let (name, outbox) = (hello.name.clone(), Vec::new());
        let node = Node {
            name,
            epoch,
            role,
            kind,
            draining: false,
            orders,
            outbox,
            hello,
            last_contact_us: now_us,
            load,
        };
        self.nodes[id.index()] = Some(node);
        Ok(spec)
    }

    /// Checks what a node says of itself against what the others are.
    ///
    /// # Errors
    /// What does not fit: another protocol, another model or block size than the others'.
    pub(super) fn check(
        &self,
        hello: &v1::Hello,
        block_tokens: u32,
    ) -> Result<(Role, CostProfile), AttachRefusal> {
        let node = || hello.name.clone();
        if hello.protocol_version != PROTOCOL_VERSION {
            return Err(AttachRefusal::Protocol { node: node(), theirs: hello.protocol_version });
        }
        if hello.name.is_empty() || hello.name.len() > MAX_NAME_BYTES {
            return Err(AttachRefusal::NoName);
        }
        let print = hello.fingerprint.clone().unwrap_or_default();
        if print.block_tokens != block_tokens {
            return Err(AttachRefusal::Blocks {
                node: node(),
                theirs: print.block_tokens,
                ours: block_tokens,
            });
        }
        // An earlier life of the node itself does not count: it may come back with another model.
        let mut others = self.iter().filter(|(_, node)| node.name != hello.name);
        if let Some((_, other)) = others.find(|(_, node)| !may_stand_beside(hello, &node.hello)) {
            let ours = other.hello.fingerprint.clone().unwrap_or_default();
            let (other, differences) = (other.name.clone(), differences(&print, &ours));
            return Err(AttachRefusal::Foreign { node: node(), other, differences });
        }
        let role = hello.role().read().ok_or_else(|| AttachRefusal::NoRole(node()))?;
        let profile = hello.profile.as_ref().and_then(v1::CostProfile::read);
        let profile = profile.ok_or_else(|| AttachRefusal::NoProfile(node()))?;
        profile.validate().map_err(|why| AttachRefusal::Profile { node: node(), why })?;
        if hello.capacity_tokens == 0 || hello.net_bytes_per_s == 0 {
            return Err(AttachRefusal::NoRoom(node()));
        }
        if hello.pass_tokens == 0 && role != Role::Store {
            return Err(AttachRefusal::NoEngine(node()));
        }
        if hello.max_running == Some(0) {
            return Err(AttachRefusal::RunsNothing(node()));
        }
        Ok((role, profile))
    }

    /// Checks that no other process is attached under the node's name. A node that has gone silent is dropped soon.
    ///
    /// # Errors
    /// Another process has the name.
    pub(super) fn name_is_free(&self, hello: &v1::Hello, now_us: u64) -> Result<(), AttachRefusal> {
        let Some(node) = self.by_name(&hello.name).and_then(|id| self.get(id)) else { return Ok(()) };
        let told = hello.process != 0 && node.hello.process != 0;
        if !told || hello.process == node.hello.process {
            return Ok(());
        }
        Err(AttachRefusal::NameTaken {
            node: hello.name.clone(),
            host: node.hello.host.clone(),
            heard_ms: now_us.saturating_sub(node.last_contact_us) / 1000,
        })
    }

    /// Takes a node out; its number stays its own until it is forgotten.
    pub(super) fn remove(&mut self, instance: InstanceId, now_us: u64) -> Option<Node> {
        let node = self.nodes.get_mut(instance.index())?.take();
        self.ids.leave(instance, now_us);
        node
    }

    /// The kind of those that are here and alike, or the lowest that nobody here is of.
    fn kind_of(&self, hello: &v1::Hello) -> u32 {
        let alike = self.iter().find(|(_, node)| node.hello.fingerprint == hello.fingerprint);
        let taken: BTreeSet<u32> = self.iter().map(|(_, node)| node.kind).collect();
        let free = || (0..).find(|kind| !taken.contains(kind)).unwrap_or(u32::MAX);
        alike.map_or_else(free, |(_, node)| node.kind)
    }

    /// The last `pause_us` count as silence of nobody.
    pub(super) fn excuse(&mut self, pause_us: u64, now_us: u64) {
        for node in self.nodes.iter_mut().flatten() {
            node.last_contact_us = node.last_contact_us.saturating_add(pause_us).min(now_us);
        }
    }

    /// Nodes that were not heard since `since_us`.
    pub(super) fn silent(&self, since_us: u64) -> Vec<(InstanceId, Epoch)> {
        self.iter().filter(|(_, n)| n.last_contact_us < since_us).map(|(id, n)| (id, n.epoch)).collect()
    }

    /// Drops the orders that were collected for the nodes: the conductor may not send them any longer.
    pub(super) fn withhold(&mut self) {
        self.nodes.iter_mut().flatten().for_each(|node| node.outbox.clear());
    }

    /// Sends what has gathered for each node, in the name of the leadership `leader`, and the step target to those that
    /// decode; returns those that could not take it.
    pub(super) fn flush(&mut self, leader: u64, step_target_us: u64) -> Vec<(InstanceId, Epoch)> {
        let mut stuck = Vec::new();
        for (at, node) in self.nodes.iter_mut().enumerate() {
            let Some(node) = node.as_mut().filter(|n| !n.outbox.is_empty()) else { continue };
            let orders = std::mem::take(&mut node.outbox);
            let step_target_us = node.role.decodes().then_some(step_target_us);
            let orders = v1::Orders { orders, leader, step_target_us };
            let message = v1::ToNode { message: Some(v1::to_node::Message::Orders(orders)) };
            if node.orders.try_send(message).is_err() {
                stuck.push((InstanceId(u32::try_from(at).unwrap_or(u32::MAX)), node.epoch));
            }
        }
        stuck
    }
}

/// Whether two nodes may serve side by side: alike, or two versions of one model and engine that move KV by a protocol
/// of their own, and then in pairs of their own. Nodes that move KV themselves are all of one kind.
fn may_stand_beside(one: &v1::Hello, other: &v1::Hello) -> bool {
    // The engine's kind and its hand-off protocol come before its version.
    let but_version = |hello: &v1::Hello| {
        let print = hello.fingerprint.clone().unwrap_or_default();
        let engine: Vec<&str> = print.engine.split(' ').take(2).collect();
        let engine = engine.join(" ");
        v1::Fingerprint { engine, revision: String::new(), ..print }
    };
    one.fingerprint == other.fingerprint
        || (one.engine_moves_kv && other.engine_moves_kv && but_version(one) == but_version(other))
}

/// In which respects two kinds of KV differ, in words.
fn differences(this: &v1::Fingerprint, that: &v1::Fingerprint) -> String {
    let words = |what: &str, this: &str, that: &str| (what.to_owned(), this.to_owned(), that.to_owned());
    let number = |what: &str, this: u64, that: u64| (what.to_owned(), this.to_string(), that.to_string());
    let all = [
        words("model", &this.model, &that.model),
        words("revision", &this.revision, &that.revision),
        words("engine", &this.engine, &that.engine),
        words("dtype", &this.dtype, &that.dtype),
        words("tokenizer", &this.tokenizer, &that.tokenizer),
        number("layers", this.layers.into(), that.layers.into()),
        number("KV heads", this.kv_heads.into(), that.kv_heads.into()),
        number("head size", this.head_dim.into(), that.head_dim.into()),
        number("tokens a block", this.block_tokens.into(), that.block_tokens.into()),
        number("bytes a block", this.block_bytes, that.block_bytes),
        number("vocabulary", this.vocab_tokens.into(), that.vocab_tokens.into()),
    ];
    let differ = all.into_iter().filter(|(_, this, that)| this != that);
    let told: Vec<_> =
        differ.map(|(what, this, that)| format!("its {what} is '{this}', not '{that}'")).collect();
    if told.is_empty() { "they hand KV over in other ways".to_owned() } else { told.join(", ") }
}

/// Names a tokenizer and its chat template by what they make of a text and a chat that all have.
pub(crate) fn tokenizer_name(text: &[u32], chat: Option<&[u32]>) -> String {
    let parts = [text, chat.unwrap_or_default()];
    let bytes: Vec<u8> = parts
        .iter()
        .flat_map(|part| {
            let length = (part.len() as u64).to_le_bytes();
            length.into_iter().chain(part.iter().flat_map(|token| token.to_le_bytes()))
        })
        .collect();
    format!("{:016x}", baton_types::ChainHasher::new(0, &bytes).parent().short().0)
}

/// Whether a node has the tokens that the front door makes; who does not know them is believed.
pub(super) fn check_tokenizer(hello: &v1::Hello, ours: &str) -> Result<(), AttachRefusal> {
    let theirs = hello.fingerprint.as_ref().map_or("", |print| print.tokenizer.as_str());
    if ours.is_empty() || theirs.is_empty() || ours == theirs {
        return Ok(());
    }
    Err(AttachRefusal::Tokenizer(hello.name.clone()))
}

/// A role by its word.
pub(crate) fn parse_role(word: &str) -> Result<Role, RoleError> {
    match word {
        "prefill" => Ok(Role::Prefill),
        "decode" => Ok(Role::Decode),
        "both" => Ok(Role::Both),
        "store" => Ok(Role::Store),
        _ => Err(RoleError::new(word)),
    }
}

fn spec_of(hello: &v1::Hello, id: (InstanceId, Epoch), role: Role, profile: CostProfile) -> InstanceSpec {
    InstanceSpec {
        id: id.0,
        epoch: id.1,
        role,
        profile: Arc::new(profile),
        capacity_tokens: hello.capacity_tokens,
        pass_tokens: hello.pass_tokens,
        pipeline_nodes: 1,
        mixed_chunk_tokens: hello.mixed_chunk_tokens,
        max_running: hello.max_running,
        net_bytes_per_s: hello.net_bytes_per_s,
        host_bytes_per_s: hello.host_bytes_per_s,
        ssd_bytes_per_s: hello.ssd_bytes_per_s,
        may_change_role: hello.may_change_role,
        engine_moves_kv: hello.engine_moves_kv,
        kind: 0,
    }
}
