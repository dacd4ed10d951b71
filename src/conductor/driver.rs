//! The conductor's loop: one message after another, each stamped with one time, each a step of the core.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_legs::pairs::{Arrival, Effect, Pairs, Phase};
use baton_router::{Event, Readiness, Refusal, Submission};
use baton_scheduler::{Conductor, ConfigError as SettingsError, Input, SchedulerConfig};
use baton_types::{ClassId, Epoch, InstanceId, RequestId, TenantId};
use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::away::PauseWatch;
use super::backend::{Door, Shared};
use super::block_keys::BlockKeys;
use super::fleet::Fleet;
use super::gap_tally::GapTally;
use super::inbox::{Inbox, Loss, Message, WeakInbox};
use super::journal::{JournalError, JournalSettings, JournalWriter};
use super::lead::Lead;
use super::policy::{UnknownClassError, limits};
use super::session::Session;
use super::slo::SloLedger;
use super::status::{Decisions, chosen, in_words, under_way};
use super::tenants::Tenants;
use crate::audit::Audit;
use crate::capture::{Capture, CaptureConfig, CaptureError, CaptureOutcome};
use crate::config::Config;
use crate::keys::AccessKeys;
use crate::metrics::Metrics;
use crate::spans::{Spans, Trace};

/// Messages handled before orders are sent on.
const BATCH_MESSAGES: usize = 256;
/// Requests under way at most; more are refused (I9).
const MAX_SESSIONS: usize = 100_000;

/// The settings and parts that a conductor starts with.
pub struct DriverConfig {
    /// The whole configuration.
    pub config: Config,
    /// Counters to keep.
    pub metrics: Metrics,
    /// The destination of request traces.
    pub spans: Spans,
}

/// Why a conductor cannot start.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// A setting is out of bounds.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The journal cannot be kept.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Requests cannot be captured.
    #[error(transparent)]
    Capture(#[from] CaptureError),
}

/// Returns the time since the start, µs.
type Clock = Box<dyn Fn() -> u64 + Send>;

/// The conductor's state; see [`Driver::run`].
pub struct Driver {
    pub(super) core: Conductor,
    pub(super) config: Config,
    /// The policy before the one in force.
    pub(super) previous: Option<SchedulerConfig>,
    /// The number of the policy in force; the first one has 1.
    pub(super) revision: u64,
    /// Who is let in, as the policy in force has it.
    pub(super) keys: AccessKeys,
    pub(super) now_us: u64,
    pub(super) sessions: BTreeMap<RequestId, Session>,
    pub(super) fleet: Fleet,
    /// Full keys of what the core calls by short names.
    pub(super) names: BlockKeys,
    /// Where each request's attempts stand, and what follows from what nodes say of them.
    pub(super) pairs: Pairs,
    pub(super) decisions: Decisions,
    pub(super) metrics: Metrics,
    /// How requests ended against the objectives of their classes.
    pub(super) slo: SloLedger,
    pub(super) spans: Spans,
    pub(super) quiesce: Vec<oneshot::Sender<()>>,
    pub(super) closing: bool,
    pub(super) canary: super::canary::Canary,
    /// Weak: the conductor ends when everybody else has let go of its inbox.
    pub(super) inbox: WeakInbox,
    pub(super) shared: Arc<Shared>,
    pub(super) capture: Option<Capture>,
    pub(super) journal: Option<JournalWriter>,
    /// Classes that clients have asked for by name.
    pub(super) classes_in_use: BTreeSet<Arc<str>>,
    pub(super) away: PauseWatch,
    tenants: Tenants,
    pub(super) effects: Vec<Effect>,
    /// Everything that pairs ordered, for tests that compare it.
    #[cfg(test)]
    pub(super) ordered: Vec<Effect>,
    pub(super) clock: Clock,
    pub(super) audit: Audit,
    /// When the gauges of the nodes were set, µs, if that was after their latest change.
    pub(super) shown_us: Option<u64>,
    /// Whether orders may be given, and under which leadership.
    pub(super) lead: Lead,
    /// The front door's; empty where it is not known.
    pub(super) tokenizer: String,
    pub(super) receiver: Option<mpsc::Receiver<Message>>,
}

impl Driver {
    /// A conductor without nodes, the inbox that leads to it, and the router's door.
    ///
    /// # Errors
    /// Names the setting that is out of bounds, or the folder that cannot be used.
    pub fn new(with: DriverConfig) -> Result<(Self, Inbox, Door), DriverError> {
        let DriverConfig { mut config, metrics, spans } = with;
        crate::policy::as_served(&mut config.scheduler);
        let started = Instant::now();
        let core = Conductor::new(config.scheduler.clone())?;
        let service = &config.service;
        let folder = |text: &String| (!text.is_empty()).then(|| PathBuf::from(text));
        let journal = folder(&service.journal)
            .map(|folder| JournalWriter::open(JournalSettings::new(folder), &core))
            .transpose()?;
        let capture = folder(&service.capture)
            .map(|folder| {
                CaptureConfig::new(folder, config.scheduler.block_tokens, *service.chain_seed.expose())
            })
            .map(Capture::start)
            .transpose()?;
        let (inbox, receiver) = super::inbox::inbox();
        let shared = Arc::new(Shared::default());
        let unread_bytes = usize::try_from(config.service.max_held_bytes / 2).unwrap_or(usize::MAX);
        let door = Door::new(inbox.clone(), Arc::clone(&shared), unread_bytes);
        let keys = AccessKeys::new(&config);
        metrics.show_classes(config.scheduler.classes.iter().map(|class| &*class.name));
        let driver = Self {
            core,
            now_us: 0,
            sessions: BTreeMap::new(),
            fleet: Fleet::default(),
            names: BlockKeys::default(),
            pairs: Pairs::new(limits(&config)),
            config,
            previous: None,
            revision: 1,
            keys,
            decisions: Decisions::default(),
            metrics,
            slo: SloLedger::default(),
            spans,
            quiesce: Vec::new(),
            closing: false,
            canary: super::canary::Canary::default(),
            inbox: inbox.downgrade(),
            shared,
            capture,
            journal,
            classes_in_use: BTreeSet::new(),
            away: PauseWatch::default(),
            tenants: Tenants::default(),
            effects: Vec::new(),
            #[cfg(test)]
            ordered: Vec::new(),
            clock: Box::new(move || u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX)),
            receiver: Some(receiver),
            audit: Audit::new(started),
            shown_us: None,
            lead: Lead::alone(),
            tokenizer: String::new(),
        };
        Ok((driver, inbox, door))
    }

    /// The driver that sends orders only as long as `lead` permits. It accepts only nodes with the front door's
    /// `tokenizer` ([`super::tokenizer_name`]).
    #[must_use]
    pub fn led_by(self, lead: Lead, tokenizer: String) -> Self {
        // It is set once: a driver has one lead.
        let _ = self.shared.lead.set(lead.clone());
        Self { lead, tokenizer, ..self }
    }

    /// The keys in force, which follow every later change.
    #[must_use]
    pub fn keys(&self) -> AccessKeys {
        self.keys.clone()
    }

    /// Serves until every sender of the inbox is gone.
    pub async fn run(mut self) {
        let Some(mut receiver) = self.receiver.take() else { return };
        let mut batch = Vec::with_capacity(BATCH_MESSAGES);
        loop {
            let wake = self.rest();
            tokio::select! {
                biased;
                count = receiver.recv_many(&mut batch, BATCH_MESSAGES) => {
                    if count == 0 {
                        return;
                    }
                }
                () = tokio::time::sleep(wake) => {}
            }
            self.away.waiting = receiver.len();
            self.turn(&mut batch);
        }
    }

    /// Takes messages in, or the time if there are none, and does what has come due.
    pub(super) fn turn(&mut self, batch: &mut Vec<Message>) {
        self.begin_turn(batch.len());
        if batch.is_empty() {
            self.step(Input::TimerFired);
        }
        for message in batch.drain(..) {
            self.now_us = (self.clock)();
            self.take_in(message);
        }
        self.notice_a_pause();
        // The driver reads the messages that arrived during its pause before it treats any node as silent.
        if self.away.behind == 0 {
            self.expire();
        }
        self.try_parked();
        self.forget_names();
        self.send_orders();
        self.answer_quiesce();
        self.show_nodes();
        self.look_over();
    }

    /// Looks the books over, if it is time to.
    fn look_over(&mut self) {
        let begun = Instant::now();
        if !self.audit.is_due(begun) {
            return;
        }
        let knows = |request| self.core.knows(request);
        let found = self.core.check_ledgers().and_then(|()| self.pairs.check(knows));
        if self.audit.looked("conductor", (begun, Instant::now()), found) {
            self.metrics.audit_failed();
        }
    }

    /// How long nothing need be done if nothing comes in.
    pub(super) fn next_wake(&mut self) -> Duration {
        let core_us = self.core.next_deadline().unwrap_or(u64::MAX);
        let pairs_us = self.pairs.next_deadline().unwrap_or(u64::MAX);
        // Silent nodes are looked for at least this often.
        let beat_us = self.now_us + self.config.service.heartbeat_us;
        let wake_us = core_us.min(pairs_us).min(beat_us).saturating_sub(self.now_us);
        Duration::from_micros(wake_us.max(50))
    }

    pub(super) fn take_in(&mut self, message: Message) {
        match message {
            Message::Submit { request, submission, events } => self.submit(request, *submission, events),
            Message::Cancel(request) => {
                self.send_usage(request);
                self.cancel(request, "client_left");
            }
            Message::Joined { hello, orders, reply } => {
                if let Err(Ok(life)) = reply.send(self.joined(*hello, orders)) {
                    let (instance, epoch) = (InstanceId(life.instance), Epoch(life.epoch));
                    self.gone(instance, epoch, &Loss::Left("it left before it was welcome".into()));
                }
            }
            Message::Facts { instance, epoch, facts } if self.fleet.is_current(instance, epoch) => {
                self.note_contact(instance);
                facts.into_iter().for_each(|fact| self.fact(instance, epoch, fact));
            }
            Message::Beat { instance, epoch, load } if self.fleet.is_current(instance, epoch) => {
                self.note_contact(instance);
                if let Some(node) = self.fleet.get_mut(instance) {
                    self.metrics.node_load(&node.name, &load);
                    node.load = *load;
                }
            }
            Message::Gone { instance, epoch, loss } => self.gone(instance, epoch, &loss),
            Message::Canary(outcome) => self.canary_ended(outcome),
            Message::Ask(question) => self.answer(question),
            Message::Facts { .. } | Message::Beat { .. } => self.metrics.stale_message(),
        }
    }

    fn note_contact(&mut self, instance: InstanceId) {
        let now_us = self.now_us;
        if let Some(node) = self.fleet.get_mut(instance) {
            node.last_contact_us = now_us;
        }
    }

    fn submit(&mut self, request: RequestId, submission: Submission, events: mpsc::Sender<Event>) {
        let wanted = submission.class.as_ref();
        let classes = &self.config.scheduler.classes;
        let named = super::policy::class_named(classes, wanted.map(AsRef::as_ref));
        let class = named.as_ref().ok().copied();
        let unknown = |why: UnknownClassError| Refusal {
            param: submission.class_param,
            ..refusal((400, "unknown_class"), why.to_string())
        };
        let class = match self.may_submit(&submission).and_then(|()| named.map_err(unknown)) {
            Ok(class) => class,
            Err(refusal) => {
                self.metrics.refused_early(&refusal.reason);
                self.count_turned_away(request, class, submission.tenant.as_deref());
                let _ = events.try_send(Event::Refused(refusal));
                return;
            }
        };
        // As many as there are classes at most: a standard tier that is none is not in use.
        if let Some(name) = wanted.filter(|name| classes.iter().any(|class| *class.name == ***name)) {
            self.classes_in_use.insert(Arc::clone(name));
        }
        let tenant = self.tenant(submission.tenant.as_ref());
        // The conductor's own requests are nobody's to trace.
        let canary = self.canary.is(request);
        let trace = if canary { Trace::default() } else { self.spans.open(submission.trace, self.now_us) };
        let submission = self.within_pools(submission);
        let session = self.open(submission, (class, tenant), events);
        let session = Session { trace, ..session };
        let (time_limit_us, asked_tokens) = (session.time_limit_us(), session.submission.sampling.max_tokens);
        let objectives = session.submission.objectives;
        self.sessions.insert(request, session);
        self.metrics.arrived();
        let arrival = Arrival { request, class, objectives, time_limit_us, asked_tokens };
        self.pair(|pairs, now_us, core, effects| pairs.arrive(now_us, arrival, core, effects));
        self.count_shadow();
    }

    /// An answer whose client names no length ends, as with a single engine, when the KV of the largest decode node is
    /// full. Beyond that it could go on nowhere.
    fn within_pools(&self, mut submission: Submission) -> Submission {
        let longest_tokens = self.core.longest_answer_tokens(submission.tokens.len() as u64);
        let longest_tokens = u32::try_from(longest_tokens).unwrap_or(u32::MAX);
        let bounded = submission.asked_tokens.is_some() || longest_tokens >= submission.sampling.max_tokens;
        if !bounded && longest_tokens > 0 {
            let sampling = Arc::make_mut(&mut submission.sampling);
            sampling.max_tokens = longest_tokens.max(sampling.min_tokens);
        }
        submission
    }

    /// Whether a submission may go before the core.
    fn may_submit(&self, submission: &Submission) -> Result<(), Refusal> {
        if self.closing {
            return Err(refusal((503, "shutting_down"), "this conductor is shutting down".into()));
        }
        if self.sessions.len() >= MAX_SESSIONS {
            return Err(refusal(
                (429, "queue_full"),
                format!("{MAX_SESSIONS} requests are under way, the most that a conductor takes"),
            ));
        }
        if submission.tokens.is_empty() {
            return Err(refusal((400, "empty_prompt"), "the prompt has no token; send at least one".into()));
        }
        Ok(())
    }

    fn count_shadow(&self) {
        for (mode, refused, judged) in &self.core.stats().shadow {
            self.metrics.shadow(mode.name(), (*refused, *judged));
        }
    }

    /// Tries requests again that nothing could take.
    pub(super) fn try_parked(&mut self) {
        if self.pairs.parked() > 0 {
            self.pair(|pairs, now_us, core, effects| pairs.try_parked(now_us, core, effects));
            self.count_shadow();
        }
    }

    fn open(
        &self,
        mut submission: Submission,
        whose: (ClassId, TenantId),
        events: mpsc::Sender<Event>,
    ) -> Session {
        if !self.fleet.iter().any(|(_, node)| node.hello.wants_body) {
            submission.body = Bytes::new();
        }
        Session {
            class: whose.0,
            tenant: whose.1,
            events,
            answer: Vec::new(),
            cached_tokens: 0,
            expected: None,
            prediction: None,
            decodes_at_us: None,
            stage: Some((Phase::Waiting, self.now_us, "none")),
            arrived_us: self.now_us,
            early: Vec::new(),
            first_token_us: None,
            last_token_us: self.now_us,
            moves: 0,
            prompt_logprobs_sent: false,
            cause: None,
            outcome: CaptureOutcome::Cancelled,
            gaps: GapTally::new(submission.sampling.max_tokens),
            satisfied: false,
            excused: false,
            trace: Trace::default(),
            submission,
        }
    }

    /// Reports to the client that its request is admitted.
    pub(super) fn admitted(&mut self, request: RequestId) {
        let names = |id: InstanceId| self.fleet.get(id).map_or_else(|| id.to_string(), |n| n.name.clone());
        let Some(session) = self.sessions.get_mut(&request) else { return };
        let known = self.decisions.of(request);
        if let Some(terms) = known.and_then(chosen) {
            session.expected.get_or_insert((terms.instance, terms.cached_tokens));
        }
        let told = known.filter(|_| session.submission.explain);
        let decision = told.and_then(|decision| in_words(decision, &names));
        self.decisions.remember(request, &session.submission.request_id);
        self.metrics.admitted();
        if !session.send(Event::Admitted { decision }) {
            self.cancel(request, "client_left");
        }
    }

    fn tenant(&mut self, name: Option<&Arc<str>>) -> TenantId {
        let Some(name) = name else { return TenantId(0) };
        let sessions = &self.sessions;
        self.tenants.number(name, || sessions.values().map(|session| session.tenant).collect())
    }

    pub(super) fn send_orders(&mut self) {
        loop {
            // Without leave nothing is ordered: another may lead by now, and order otherwise.
            let Some(leader) = self.lead.token() else { return self.fleet.withhold() };
            let stuck = self.fleet.flush(leader, self.config.scheduler.step_target_us());
            if stuck.is_empty() {
                return;
            }
            for (instance, epoch) in stuck {
                self.gone(instance, epoch, &Loss::Died("it does not take its orders".into()));
            }
        }
    }

    fn answer_quiesce(&mut self) {
        if self.closing {
            self.publish_readiness();
        }
        if self.sessions.is_empty() {
            for waiting in self.quiesce.drain(..) {
                let _ = waiting.send(());
            }
        }
    }

    /// Publishes to the router whether the conductor can serve requests.
    pub(super) fn publish_readiness(&self) {
        let pair = self.core.has_pair();
        let nodes = self.fleet.iter().count();
        let detail = match (pair, self.canary.passed()) {
            _ if self.closing => format!("draining: {}", under_way(self.sessions.len() as u64)),
            (true, true) => format!("{nodes} nodes; a canary passed through a pair"),
            (true, false) => format!("{nodes} nodes; waiting for a canary to pass through a pair"),
            (false, true) => format!("{nodes} nodes; no prefill instance: decode instances prefill"),
            (false, false) => format!("{nodes} nodes; a prefill or a decode instance is missing"),
        };
        let ready = self.core.can_serve() && self.canary.passed() && !self.closing;
        *self.shared.readiness.lock() = Some(Readiness { ready, detail });
    }
}

/// A refusal before the core is asked.
fn refusal((status, reason): (u16, &str), message: String) -> Refusal {
    Refusal {
        status,
        reason: reason.into(),
        message: message.into(),
        retry_after_us: (status != 400).then_some(1_000_000),
        param: None,
        predicted_ttft_us: None,
    }
}
