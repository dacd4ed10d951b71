//! How everything stands, for the admin page, `baton top` and "why did it go there?".

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use baton_legs::pairs::Phase;
use baton_scheduler::{Decision, Input, Rejection, RoleAdvice};
use baton_types::{InstanceId, RequestId, Tier};
use serde::{Deserialize, Serialize};

use super::driver::Driver;
use super::inbox::Question;
use super::node_error::NodeChangeError;
use super::session::Session;
use super::slo::SloStatus;
use crate::policy::in_lines;

/// So many requests, in words.
#[must_use]
pub fn under_way(requests: u64) -> String {
    match requests {
        1 => "1 request is under way".to_owned(),
        requests => format!("{requests} requests are under way"),
    }
}

/// Decisions that are remembered.
const DECISIONS: usize = 1024;

/// The whole state that `/admin/status` reports.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// Time since the start, µs.
    pub uptime_us: u64,
    /// Whether calls can be served, and what is missing.
    pub ready: bool,
    /// In words.
    pub detail: String,
    /// Servers that are driven from here and not attached, with the reasons.
    #[serde(default)]
    pub outside: BTreeMap<String, String>,
    /// SLO attainment of each class, in the order of the configuration.
    #[serde(default)]
    pub slo: Vec<SloStatus>,
    /// How much of each part of the cluster the demand of the last minutes uses up, and how many nodes of each it asks
    /// for; none until half a minute was seen.
    #[serde(default)]
    pub roles: Option<RoleAdvice>,
    /// Every attached node.
    pub nodes: Vec<NodeStatus>,
    /// Open requests, oldest first, at most a hundred.
    pub requests: Vec<RequestStatus>,
    /// Number of requests in progress.
    pub live_requests: u64,
    /// Counters of the conductor, by name. `/admin/status` adds those of the exported metrics.
    pub counters: BTreeMap<String, u64>,
    /// Why the journal is not written at present, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal_error: Option<String>,
    /// Requests refused before any work since the start, by reason. `/admin/status` adds them.
    #[serde(default)]
    pub refused: BTreeMap<String, u64>,
    /// The latest decisions, newest first, in words.
    pub decisions: Vec<String>,
}

/// One node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its name.
    pub name: String,
    /// Its number.
    pub instance: u32,
    /// The node's life.
    pub epoch: u32,
    /// Its part.
    pub role: String,
    /// `serving` or `draining`; `drained` when nothing is left on it, by its last report and by what it was given since.
    pub state: String,
    /// The build that the node's KV belongs to: the engine with its version, and the revision if the node reports one.
    /// Pairs form only among equal builds.
    #[serde(default)]
    pub build: String,
    /// Time since its latest message, µs.
    pub heard_us_ago: u64,
    /// Prefill backlog predicted, µs.
    pub backlog_us: u64,
    /// Prefills held back for it.
    pub waiting: u32,
    /// Prefills sent to it.
    pub dispatched: u32,
    /// Decodes promised to it.
    pub decodes: u32,
    /// KV tokens promised to decodes.
    pub reserved_tokens: u64,
    /// Step time predicted, µs.
    pub step_us: u64,
    /// Rate of its network link as learnt from flights, out of it and into it, bytes/s.
    #[serde(default)]
    pub link_bytes_per_s: [u64; 2],
    /// Sequences that its engine runs.
    pub running: u32,
    /// Holds on its store: 0 at rest.
    pub holds: u32,
    /// Its tiers: name, used, reserved and capacity in blocks, blocks hit, blocks evicted.
    pub tiers: Vec<(String, u64, u64, u64, u64, u64)>,
    /// Bytes that it handed off.
    pub handoff_bytes: u64,
    /// KV bytes that came to it from other nodes: hand-offs and fetches.
    #[serde(default)]
    pub received_bytes: u64,
    /// Blocks that it refused to serve since their bytes were not what was sealed.
    pub integrity_rejects: u64,
}

/// One request under way.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RequestStatus {
    /// The client's id.
    pub request_id: String,
    /// Its stage.
    pub stage: String,
    /// Since its arrival, µs.
    pub age_us: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Tokens that the client has.
    pub answer_tokens: u64,
    /// Placements so far.
    pub attempts: u32,
    /// Legs, by instance number.
    pub prefill: Option<u32>,
    /// See `prefill`.
    pub decode: Option<u32>,
}

/// A decision, with what came of it.
struct KnownDecision {
    decision: Decision,
    /// The id that its client knows.
    request_id: Option<Arc<str>>,
    /// Where its answer is to be decoded.
    decode: Option<InstanceId>,
    refusal: Option<KnownRefusal>,
}

/// Why a request was refused.
#[derive(Serialize)]
struct KnownRefusal {
    class: String,
    reason: &'static str,
    retry_after_us: u64,
    predicted_ttft_us: Option<u64>,
}

/// The latest decisions, by request.
#[derive(Default)]
pub(super) struct Decisions {
    latest: VecDeque<KnownDecision>,
}

impl Decisions {
    pub(super) fn note(&mut self, decision: Decision) {
        if self.latest.len() == DECISIONS {
            self.latest.pop_front();
        }
        self.latest.push_back(KnownDecision { decision, request_id: None, decode: None, refusal: None });
    }

    /// Where the decision about a request is that was just made.
    fn place_of(&self, request: RequestId) -> Option<usize> {
        let from = self.latest.len().saturating_sub(8);
        (from..self.latest.len()).rev().find(|at| self.latest[*at].decision.request == request)
    }

    /// Ties the request's decision to the id that its client knows.
    pub(super) fn remember(&mut self, request: RequestId, request_id: &Arc<str>) {
        if let Some(at) = self.place_of(request) {
            self.latest[at].request_id = Some(Arc::clone(request_id));
        }
    }

    /// The prefill of a request that arrived then is sent, and this is where it will be decoded.
    pub(super) fn decodes_at(&mut self, request: RequestId, arrived_us: u64, decode: InstanceId) {
        let mut since = self.latest.iter_mut().rev().take_while(|known| known.decision.at_us >= arrived_us);
        if let Some(known) = since.find(|known| known.decision.request == request) {
            known.decode = Some(decode);
        }
    }

    /// A request was refused. Where nothing was compared, as for a prompt that fits nowhere, that is a decision as well.
    pub(super) fn refused(&mut self, rejection: &Rejection, session: &Session, class: &str, at_us: u64) {
        let Rejection { request, reason, retry_after_us, predicted_ttft_us, .. } = *rejection;
        let at = self.place_of(request).unwrap_or_else(|| {
            self.note(Decision { request, at_us, chosen: None, candidates: Vec::new() });
            self.latest.len() - 1
        });
        let known = &mut self.latest[at];
        known.request_id = Some(Arc::clone(&session.submission.request_id));
        let (class, reason) = (class.to_owned(), reason.name());
        known.refusal = Some(KnownRefusal { class, reason, retry_after_us, predicted_ttft_us });
    }

    /// A request's latest decision, if it was just made.
    pub(super) fn of(&self, request: RequestId) -> Option<&Decision> {
        self.place_of(request).map(|at| &self.latest[at].decision)
    }

    /// The requests of an id: those of clients that gave it, else the one that nodes' logs call by this number.
    fn called(&self, id: &str) -> BTreeSet<RequestId> {
        let named = self.latest.iter().filter(|known| known.request_id.as_deref() == Some(id));
        let named: BTreeSet<_> = named.map(|known| known.decision.request).collect();
        if named.is_empty() { id.parse().map(RequestId).into_iter().collect() } else { named }
    }

    /// The recorded decisions about a request, by either of its ids. `name` returns the name that had a number at a
    /// time.
    fn table(&self, id: &str, name: &dyn Fn(InstanceId, u64) -> String) -> Option<String> {
        let called = self.called(id);
        let decisions: Vec<_> =
            self.latest.iter().filter(|known| called.contains(&known.decision.request)).collect();
        if decisions.is_empty() {
            return None;
        }
        let request_id = decisions.iter().rev().find_map(|known| known.request_id.as_deref());
        let rows = decisions.into_iter().map(|KnownDecision { decision, decode, refusal, .. }| {
            let name = |instance| name(instance, decision.at_us);
            let candidates = decision.candidates.iter().map(|c| {
                serde_json::json!({
                    "node": name(c.instance), "chosen": decision.chosen == Some(c.instance),
                    "queue_us": c.queue_us, "load_us": c.load_us, "compute_us": c.compute_us,
                    "cached_tokens": c.cached_tokens, "fetch_from": c.fetch_from.map(name),
                    "ttft_us": c.ttft_us, "score": c.score, "feasible": c.feasible,
                })
            });
            let candidates: Vec<_> = candidates.collect();
            serde_json::json!({
                "number": decision.request.0, "at_us": decision.at_us, "decode": decode.map(name),
                "refused": refusal, "candidates": candidates,
            })
        });
        let explained =
            serde_json::json!({ "request_id": request_id, "decisions": rows.collect::<Vec<_>>() });
        Some(explained.to_string())
    }
}

/// The text that distinguishes the versions of a node's engine and model.
fn build_of(hello: &baton_wire::v1::Hello) -> String {
    let print = hello.fingerprint.clone().unwrap_or_default();
    format!("{} {}", print.engine.trim(), print.revision).trim().to_owned()
}

/// The prediction for the instance that a decision chose.
pub(super) fn chosen(decision: &Decision) -> Option<&baton_scheduler::CandidateTerms> {
    let chosen = decision.chosen?;
    decision.candidates.iter().find(|c| c.instance == chosen)
}

/// A decision in a line.
pub(super) fn in_words(decision: &Decision, name: &dyn Fn(InstanceId) -> String) -> Option<Arc<str>> {
    let terms = chosen(decision)?;
    let ms = |us: Option<u64>| us.map_or_else(|| "none".into(), |us| format!("{:.1}", us as f64 / 1e3));
    let words = format!(
        "prefill={} ttft_ms={} queue_ms={} load_ms={} compute_ms={} cached_tokens={} candidates={}",
        name(terms.instance),
        ms(terms.ttft_us),
        ms(Some(terms.queue_us)),
        ms(terms.load_us),
        ms(terms.compute_us),
        terms.cached_tokens,
        decision.candidates.len()
    );
    Some(words.into())
}

impl Driver {
    pub(super) fn answer(&mut self, question: Question) {
        match question {
            Question::Status(reply) => {
                let _ = reply.send(Box::new(self.status()));
            }
            Question::Explain(request_id, reply) => {
                let explained = self.decisions.table(&request_id, &|id, at_us| self.name_of(id, at_us));
                let _ = reply.send(explained);
            }
            Question::Config(reply) => {
                let _ = reply.send(Box::new(self.config.clone()));
            }
            Question::PolicyInForce(reply) => {
                let _ = reply.send(Box::new((self.revision, self.config.clone())));
            }
            Question::Rollback(basis, reply) => {
                let _ = reply.send(self.roll_back(basis.as_deref()));
            }
            Question::Policy(change, reply) => {
                let _ = reply.send(self.take_policy(*change));
            }
            Question::CheckPolicy(config, reply) => {
                let _ = reply.send(self.checked_policy(*config).map(|(_, changes)| in_lines(&changes)));
            }
            Question::Drain { node, drain, reply } => {
                let _ = reply.send(self.drain(&node, drain));
            }
            Question::Role { node, role, reply } => {
                let _ = reply.send(self.change_role(&node, role));
            }
            Question::Quiesce(reply) => {
                self.closing = true;
                self.publish_readiness();
                self.quiesce.push(reply);
            }
        }
    }

    /// The name that had the number at that time. It is the bare number where the name is forgotten.
    fn name_of(&self, instance: InstanceId, at_us: u64) -> String {
        self.fleet.name_at(instance, at_us).map_or_else(|| format!("#{instance}"), str::to_owned)
    }

    fn drain(&mut self, name: &str, drain: bool) -> Result<(), NodeChangeError> {
        let instance = self.fleet.by_name(name).ok_or_else(|| self.unknown(name))?;
        if let Some(node) = self.fleet.get_mut(instance) {
            node.draining = drain;
        }
        self.step(if drain {
            Input::InstanceDrained { instance }
        } else {
            Input::InstanceResumed { instance }
        });
        self.look_after_model();
        self.look_after_canary();
        Ok(())
    }

    /// The conductor gave a node another role, because the demand of the last minutes asks for it.
    pub(super) fn role_changed(&mut self, instance: InstanceId, role: baton_types::Role) {
        let Some(node) = self.fleet.get_mut(instance) else { return };
        tracing::info!(node = %node.name, from = node.role.name(), to = role.name(), "role changed by forecast");
        node.role = role;
        self.look_after_model();
        self.look_after_canary();
    }

    fn change_role(&mut self, name: &str, role: baton_types::Role) -> Result<(), NodeChangeError> {
        let instance = self.fleet.by_name(name).ok_or_else(|| self.unknown(name))?;
        if let Some(node) = self.fleet.get_mut(instance) {
            if node.hello.pass_tokens == 0 && role != node.role {
                return Err(NodeChangeError::NoEngine(name.to_owned()));
            }
            node.role = role;
        }
        self.step(Input::RoleChanged { instance, role });
        self.look_after_model();
        self.look_after_canary();
        Ok(())
    }

    fn unknown(&self, name: &str) -> NodeChangeError {
        let known: Vec<&str> = self.fleet.iter().map(|(_, node)| node.name.as_str()).collect();
        NodeChangeError::Unknown { name: name.to_owned(), known: known.join(", ") }
    }

    /// The instances that have something of a request; none is looked for unless a node drains.
    fn busy_instances(&self) -> BTreeSet<InstanceId> {
        let drains = self.fleet.iter().any(|(_, node)| node.draining);
        let moves_kv = |id: InstanceId| self.fleet.get(id).is_some_and(|node| node.hello.engine_moves_kv);
        let pairs = self.pairs.iter().filter(|_| drains);
        let legs = pairs.flat_map(|(_, pair)| {
            let [prefill, decode] = pair.legs();
            // KV that has landed is no longer needed where it was computed. An engine that moves KV itself does not say
            // when it has.
            let prefill = prefill.filter(|id| pair.phase() != Phase::Decoding || moves_kv(*id));
            [prefill, decode]
        });
        legs.flatten().collect()
    }

    /// Every attached node.
    pub(super) fn node_statuses(&self) -> Vec<NodeStatus> {
        let loads = self.core.snapshot().instances;
        let loads: BTreeMap<_, _> = loads.iter().map(|load| (load.instance, load)).collect();
        let busy = self.busy_instances();
        let nodes = self.fleet.iter().map(|(id, node)| {
            let load = loads.get(&id);
            let queued = load.is_some_and(|l| l.waiting + l.dispatched + l.decodes > 0);
            NodeStatus {
                name: node.name.clone(),
                instance: id.0,
                epoch: node.epoch.0,
                role: node.role.name().into(),
                state: node.state(queued || busy.contains(&id)).into(),
                build: build_of(&node.hello),
                heard_us_ago: self.now_us.saturating_sub(node.last_contact_us),
                backlog_us: load.map_or(0, |l| l.backlog_us),
                waiting: load.map_or(0, |l| l.waiting),
                dispatched: load.map_or(0, |l| l.dispatched),
                decodes: load.map_or(0, |l| l.decodes),
                reserved_tokens: load.map_or(0, |l| l.reserved_tokens),
                step_us: load.map_or(0, |l| l.step_us),
                link_bytes_per_s: load.map_or([0; 2], |l| l.link_bytes_per_s),
                running: node.load.running,
                holds: node.load.holds,
                tiers: node
                    .load
                    .tiers
                    .iter()
                    .map(|t| {
                        (
                            t.tier().read().map_or("other", Tier::name).to_owned(),
                            t.used_blocks,
                            t.reserved_blocks,
                            t.capacity_blocks,
                            t.hit_blocks,
                            t.evicted_blocks,
                        )
                    })
                    .collect(),
                handoff_bytes: node.load.handoff_bytes,
                received_bytes: node.load.received_bytes,
                integrity_rejects: node.load.integrity_rejects,
            }
        });
        nodes.collect()
    }

    fn status(&self) -> Status {
        let known = self.sessions.iter().filter_map(|(id, s)| Some((s, self.pairs.get(*id)?)));
        let requests = known.take(100).map(|(s, pair)| RequestStatus {
            request_id: s.submission.request_id.to_string(),
            stage: pair.phase().name().into(),
            age_us: self.now_us.saturating_sub(s.arrived_us),
            prompt_tokens: s.submission.tokens.len() as u64,
            answer_tokens: s.answer.len() as u64,
            attempts: pair.attempt(),
            prefill: pair.legs()[0].map(|id| id.0),
            decode: pair.legs()[1].map(|id| id.0),
        });
        let readiness = self.shared.readiness.lock().clone();
        Status {
            uptime_us: self.now_us,
            ready: readiness.as_ref().is_some_and(|r| r.ready),
            detail: readiness.map_or_else(String::new, |r| r.detail),
            slo: self.slo.status(&self.config.scheduler.classes, self.now_us),
            roles: self.core.role_advice(),
            nodes: self.node_statuses(),
            requests: requests.collect(),
            live_requests: self.sessions.len() as u64,
            counters: self.counters(),
            journal_error: self.journal.as_ref().and_then(|journal| journal.status().error),
            decisions: self.recent_decisions(),
            ..Status::default()
        }
    }

    fn recent_decisions(&self) -> Vec<String> {
        let recent = self.decisions.latest.iter().rev().take(20);
        recent
            .map(|KnownDecision { decision, request_id, decode, refusal }| {
                let name = |id| self.name_of(id, decision.at_us);
                let candidates = decision.candidates.len();
                let words = match (in_words(decision, &name), refusal) {
                    (_, Some(KnownRefusal { reason, class, .. })) => {
                        format!("refused reason={reason} class={class} candidates={candidates}")
                    }
                    (Some(words), None) => {
                        let decode = decode.map_or_else(String::new, |id| format!(" decode={}", name(id)));
                        format!("{words}{decode}")
                    }
                    (None, None) => format!("refused candidates={candidates}"),
                };
                format!("{} {words}", request_id.as_deref().unwrap_or("-"))
            })
            .collect()
    }
}
