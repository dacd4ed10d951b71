//! The sequences of an engine. The roster decides which may start and what the next pass computes of each, and handles
//! the tokens that it drew. Both engines keep their sequences here.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use baton_types::{Finish, PassLimit, PassLoad, Sampling, TokenLogprob};

use crate::{Event, ModelCard, PoolSpec, Sequence, SequenceId, StartError, StepTarget};

/// The state of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for its first pass, or for its turn after a lack of slots.
    Waiting,
    /// Has its place in the passes.
    Running,
    /// Drew its first token, and its KV leaves.
    Held,
    /// Has no slot for its next token and waits for [`Roster::extend`].
    Starved,
}

/// One sequence; `X` is what its engine keeps beside it.
#[derive(Debug)]
pub(crate) struct Entry<X> {
    /// As it was started, with the tokens drawn since.
    pub(crate) sequence: Sequence,
    /// The engine's own data of the sequence.
    pub(crate) extra: X,
    /// Logprobs of prompt tokens so far.
    pub(crate) prompt_logprobs: Vec<TokenLogprob>,
    state: State,
    arrival: u64,
    computed: u32,
    announced: bool,
    /// Its place among those that have begun; none while it has not.
    begun: Option<u64>,
    /// Its share of the passes that computed it.
    spent: Duration,
}

/// The part of one sequence that a pass computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The sequence.
    pub(crate) id: SequenceId,
    /// The positions of the tokens to compute.
    pub(crate) tokens: Range<u32>,
    /// Whether it ends with the sequence's last token, so that the next one is drawn.
    pub(crate) draws: bool,
    /// Whether it is one token that draws the next: a decode step.
    pub(crate) decodes: bool,
}

impl Chunk {
    fn len(&self) -> u32 {
        self.tokens.end - self.tokens.start
    }
}

/// All sequences of an engine.
#[derive(Debug)]
pub(crate) struct Roster<X> {
    entries: BTreeMap<SequenceId, Entry<X>>,
    pool: PoolSpec,
    model: ModelCard,
    arrivals: u64,
    begun: u64,
    target: Option<StepTarget>,
    /// When the pass in progress began, and how many prompt tokens it computes.
    pass: Option<(Instant, u32)>,
}

impl<X> Entry<X> {
    fn len(&self) -> u32 {
        u32::try_from(self.sequence.tokens.len()).expect("bounded by the model's length at start")
    }

    fn remaining(&self) -> u32 {
        self.len() - self.computed
    }

    fn has_slot(&self, block_tokens: u32) -> bool {
        (self.computed / block_tokens) < u32::try_from(self.sequence.blocks.len()).unwrap_or(u32::MAX)
    }
}

impl<X> Roster<X> {
    /// A roster without sequences.
    pub(crate) fn new(pool: PoolSpec, model: ModelCard) -> Self {
        Self { entries: BTreeMap::new(), pool, model, arrivals: 0, begun: 0, target: None, pass: None }
    }

    /// The model that the sequences are checked against.
    pub(crate) fn model(&self) -> &ModelCard {
        &self.model
    }

    /// The sequence, which must be here.
    pub(crate) fn entry(&self, id: SequenceId) -> &Entry<X> {
        self.entries.get(&id).expect("chunks name sequences of this roster")
    }

    /// The sequence, which must be here.
    pub(crate) fn entry_mut(&mut self, id: SequenceId) -> &mut Entry<X> {
        self.entries.get_mut(&id).expect("chunks name sequences of this roster")
    }

    /// Whether `sequence` could start now.
    ///
    /// # Errors
    /// As [`crate::Engine::start`].
    pub(crate) fn admits(&self, sequence: &Sequence) -> Result<(), StartError> {
        let fail = |what: String| Err(StartError(format!("engine start: {what}")));
        if self.entries.contains_key(&sequence.id) {
            return fail(format!("sequence {} is in use; stop it first", sequence.id.0));
        }
        if self.entries.len() >= self.pool.blocks as usize {
            return fail(format!("{} sequences for as many slots; wait for one to end", self.entries.len()));
        }
        check_tokens(sequence, &self.model).or_else(fail)?;
        check_slots(sequence, &self.pool).or_else(fail)?;
        check_sampling(sequence, &self.model).or_else(fail)
    }

    /// Takes in a sequence that [`Roster::admits`].
    pub(crate) fn start(&mut self, sequence: Sequence, extra: X) {
        self.arrivals += 1;
        let entry = Entry {
            computed: sequence.computed_tokens,
            extra,
            prompt_logprobs: Vec::new(),
            state: State::Waiting,
            arrival: self.arrivals,
            announced: false,
            begun: None,
            spent: Duration::ZERO,
            sequence,
        };
        self.entries.insert(entry.sequence.id, entry);
    }

    /// As [`crate::Engine::set_step_target`].
    pub(crate) fn set_step_target(&mut self, target: Option<StepTarget>) {
        self.target = target;
    }

    /// As [`crate::Engine::extend`]. Slots that the pool does not have are left out.
    pub(crate) fn extend(&mut self, id: SequenceId, blocks: &[u32]) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.sequence.blocks.extend(blocks.iter().filter(|block| **block < self.pool.blocks));
            if entry.state == State::Starved && entry.has_slot(self.pool.block_tokens) {
                entry.state = State::Waiting;
            }
        }
    }

    /// As [`crate::Engine::stop`].
    pub(crate) fn stop(&mut self, id: SequenceId) {
        self.entries.remove(&id);
    }

    /// Whether there is no sequence, not even a held or starved one.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// As [`crate::Engine::load`]: held and starved sequences neither run nor wait.
    pub(crate) fn load(&self) -> (u32, u32) {
        let count = |state| self.entries.values().filter(|entry| entry.state == state).count();
        let narrow = |n| u32::try_from(n).expect("no more sequences than slots");
        (narrow(count(State::Running)), narrow(count(State::Waiting)))
    }

    /// Plans the next pass. First comes one token for each sequence that runs and has one left. Longer rests follow up
    /// to the pass's bound: those that have begun, then the others in ascending order, then by arrival.
    pub(crate) fn plan(&mut self, events: &mut Vec<Event>) -> Vec<Chunk> {
        self.starve(events);
        let mut turns: Vec<(bool, bool, u64, u64, SequenceId)> = self
            .entries
            .iter()
            .filter(|(_, entry)| matches!(entry.state, State::Waiting | State::Running))
            .map(|(id, entry)| {
                let place = entry.begun.unwrap_or(entry.sequence.order);
                (entry.remaining() > 1, entry.begun.is_none(), place, entry.arrival, *id)
            })
            .collect();
        turns.sort_unstable();
        let mut running = self.load().0;
        let mut prompts = None;
        let mut chunks = Vec::with_capacity(turns.len());
        for (long, _, _, _, id) in turns {
            let entry = self.entries.get_mut(&id).expect("listed above");
            if entry.state == State::Waiting && running >= self.pool.max_running {
                continue;
            }
            let mut tokens = 1;
            if long {
                let limit = || PassLoad::new(prompt_limit(&self.pool, self.target.as_ref(), &chunks));
                tokens =
                    prompts.get_or_insert_with(limit).take(entry.remaining().into(), entry.computed.into());
                if tokens == 0 {
                    break;
                }
            }
            if entry.state == State::Waiting {
                entry.state = State::Running;
                running += 1;
            }
            if entry.begun.is_none() {
                self.begun += 1;
                entry.begun = Some(self.begun);
            }
            chunks.push(entry.next_chunk(u32::try_from(tokens).expect("no more than are left")));
        }
        let prompt_tokens = chunks.iter().filter(|chunk| !chunk.decodes).map(Chunk::len).sum();
        self.pass = Some((Instant::now(), prompt_tokens));
        chunks
    }

    /// Records that a chunk has been computed. Reports when all tokens that the sequence started with are computed.
    pub(crate) fn computed(&mut self, chunk: &Chunk, events: &mut Vec<Event>) {
        let id = chunk.id;
        // A pass that several prompts share costs each its share.
        let shared = self.pass.filter(|(_, all)| *all > 0 && !chunk.decodes);
        let entry = self.entry_mut(id);
        entry.computed = chunk.tokens.end;
        if let Some((since, all)) = shared {
            entry.spent += since.elapsed() * chunk.len() / all;
        }
        if entry.remaining() > 0 || entry.announced {
            return;
        }
        entry.announced = true;
        if entry.sequence.sampling.prompt_logprobs.is_some() {
            let logprobs = std::mem::take(&mut entry.prompt_logprobs);
            events.push(Event::PromptLogprobs { id, logprobs });
        }
        let compute_us = u64::try_from(entry.spent.as_micros()).unwrap_or(u64::MAX);
        events.push(Event::Computed { id, compute_us });
    }

    /// Takes the token that was drawn for a sequence; the sequence is gone if that was its last.
    pub(crate) fn drawn(
        &mut self,
        id: SequenceId,
        token: u32,
        logprob: Option<TokenLogprob>,
        events: &mut Vec<Event>,
    ) {
        let max_model_tokens = self.model.max_model_tokens;
        let entry = self.entries.get_mut(&id).expect("chunks name sequences of this roster");
        let index = entry.len() - entry.sequence.prompt_tokens;
        entry.sequence.tokens.push(token);
        let sampling = &entry.sequence.sampling;
        let finish = if ends_answer(sampling, &self.model.end_tokens, token) {
            Some(Finish::Stop)
        } else if index + 1 >= sampling.max_tokens || entry.len() >= max_model_tokens {
            Some(Finish::Length)
        } else {
            None
        };
        if finish.is_some() {
            self.entries.remove(&id);
        } else if entry.sequence.leaves {
            entry.state = State::Held;
        }
        events.push(Event::Token { id, index, token, logprob, finish });
    }

    /// Sets sequences aside whose next token has no slot, and says so.
    pub(crate) fn starve(&mut self, events: &mut Vec<Event>) {
        for (id, entry) in &mut self.entries {
            let ready = matches!(entry.state, State::Waiting | State::Running);
            if ready && !entry.has_slot(self.pool.block_tokens) {
                entry.state = State::Starved;
                events.push(Event::Starved { id: *id });
            }
        }
    }
}

impl<X> Entry<X> {
    fn next_chunk(&mut self, budget: u32) -> Chunk {
        let end = self.computed + self.remaining().min(budget);
        Chunk {
            id: self.sequence.id,
            tokens: self.computed..end,
            draws: end == self.len(),
            decodes: end == self.len() && end - self.computed == 1,
        }
    }
}

/// How many prompt tokens a pass with these decodes takes in.
fn prompt_limit<'a>(pool: &PoolSpec, target: Option<&'a StepTarget>, decodes: &[Chunk]) -> PassLimit<'a> {
    let most = u64::from(pool.pass_tokens);
    let Some(target) = target.filter(|_| !decodes.is_empty()) else { return PassLimit::whole(most) };
    let context = decodes.iter().map(|chunk| u64::from(chunk.tokens.end)).sum();
    let batch = u32::try_from(decodes.len()).expect("no more sequences than slots");
    #[expect(clippy::cast_precision_loss, reason = "step times are far below 2^53")]
    let free_us = target.time_us as f64 - target.profile.decode_us(batch, context);
    PassLimit::beside(most, &target.profile, free_us)
}

/// Whether `token` ends an answer.
fn ends_answer(sampling: &Sampling, end_tokens: &[u32], token: u32) -> bool {
    (!sampling.ignore_eos && end_tokens.contains(&token)) || sampling.stop_token_ids.contains(&token)
}

fn check_tokens(sequence: &Sequence, model: &ModelCard) -> Result<(), String> {
    let len = sequence.tokens.len();
    if len >= model.max_model_tokens as usize {
        return Err(format!(
            "{len} tokens leave no room in a model of {}; shorten the prompt",
            model.max_model_tokens
        ));
    }
    if sequence.prompt_tokens == 0 || sequence.prompt_tokens as usize > len {
        return Err(format!("prompt_tokens {} of {len} tokens; it must be 1 to all", sequence.prompt_tokens));
    }
    if sequence.computed_tokens as usize >= len {
        return Err(format!(
            "computed_tokens {} of {len} leave nothing to compute; leave at least the last token",
            sequence.computed_tokens
        ));
    }
    match sequence.tokens.iter().find(|token| **token >= model.vocab_tokens) {
        Some(token) => Err(format!("token {token} is not in the vocabulary of {}", model.vocab_tokens)),
        None => Ok(()),
    }
}

fn check_slots(sequence: &Sequence, pool: &PoolSpec) -> Result<(), String> {
    let need = sequence.tokens.len().div_ceil(pool.block_tokens as usize);
    if sequence.blocks.len() < need {
        return Err(format!(
            "{} slots for {} tokens in blocks of {}; it needs {need}",
            sequence.blocks.len(),
            sequence.tokens.len(),
            pool.block_tokens
        ));
    }
    let mut sorted = sequence.blocks.clone();
    sorted.sort_unstable();
    if let Some(block) = sorted.last().filter(|block| **block >= pool.blocks) {
        return Err(format!("slot {block} is out of range; the pool has {}", pool.blocks));
    }
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("slot {} is named twice", pair[0])),
        None => Ok(()),
    }
}

fn check_sampling(sequence: &Sequence, model: &ModelCard) -> Result<(), String> {
    let sampling = &*sequence.sampling;
    if sampling.prompt_logprobs.is_some() && sequence.computed_tokens > 0 {
        return Err("prompt_logprobs need the whole prompt computed; start with computed_tokens 0".into());
    }
    let drawn = sequence.tokens.len() - sequence.prompt_tokens as usize;
    if drawn >= sampling.max_tokens as usize {
        return Err(format!("{drawn} of max_tokens {} are drawn; none is left", sampling.max_tokens));
    }
    let unit = 0.0..=1.0;
    let rules = [
        ("temperature", sampling.temperature, sampling.temperature >= 0.0),
        ("top_p", sampling.top_p, unit.contains(&sampling.top_p)),
        ("min_p", sampling.min_p, unit.contains(&sampling.min_p)),
        ("presence_penalty", sampling.presence_penalty, true),
        ("frequency_penalty", sampling.frequency_penalty, true),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0.0),
    ];
    if let Some((name, value, _)) = rules.iter().find(|(_, value, fits)| !fits || !value.is_finite()) {
        return Err(format!("{name} {value} is out of range"));
    }
    match sampling.logit_bias.iter().find(|(token, bias)| *token >= model.vocab_tokens || !bias.is_finite()) {
        Some((token, bias)) => Err(format!("logit_bias {bias} of token {token} is out of range")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn roster(pass_tokens: u32, max_running: u32) -> Roster<()> {
        let pool = PoolSpec { block_tokens: 4, blocks: 256, pass_tokens, max_running, threads: None };
        let model = ModelCard {
            name: "tokens alone".into(),
            revision: "1".into(),
            vocab_tokens: 300,
            end_tokens: Vec::new(),
            max_model_tokens: 400,
        };
        Roster::new(pool, model)
    }

    /// A prompt of `len` tokens, answered with nine.
    fn prompt(id: u64, len: u32, order: u64) -> Sequence {
        Sequence {
            id: SequenceId(id),
            tokens: vec![1; len as usize],
            prompt_tokens: len,
            computed_tokens: 0,
            blocks: (0..20).collect(),
            sampling: Arc::new(Sampling { max_tokens: 9, ..Sampling::default() }),
            leaves: false,
            order,
        }
    }

    /// One pass: what it computed of each sequence.
    fn pass(roster: &mut Roster<()>) -> Vec<(u64, std::ops::Range<u32>)> {
        let mut events = Vec::new();
        let chunks = roster.plan(&mut events);
        for chunk in &chunks {
            roster.computed(chunk, &mut events);
            if chunk.draws {
                roster.drawn(chunk.id, 1, None, &mut events);
            }
        }
        chunks.into_iter().map(|chunk| (chunk.id.0, chunk.tokens)).collect()
    }

    #[test]
    fn decodes_come_first_then_prompts_in_order_up_to_the_pass() {
        let mut roster = roster(10, 8);
        roster.start(prompt(1, 4, 5), ());
        assert_eq!(pass(&mut roster), [(1, 0..4)]);
        roster.start(prompt(2, 25, 7), ());
        roster.start(prompt(3, 8, 6), ());
        roster.start(prompt(4, 1, 99), ());
        assert_eq!(roster.load(), (1, 3));
        assert_eq!(pass(&mut roster), [(1, 4..5), (4, 0..1), (3, 0..8), (2, 0..2)]);
        roster.start(prompt(5, 3, 1), ());
        // A sequence that has begun is not overtaken, whatever its order.
        assert_eq!(pass(&mut roster), [(1, 5..6), (4, 1..2), (3, 8..9), (2, 2..12)]);
        assert_eq!(roster.load(), (4, 1));
        roster.start(prompt(6, 3, 0), ());
        let next = pass(&mut roster);
        assert_eq!(next[3..], [(2, 12..22)], "{next:?}");
        assert_eq!(pass(&mut roster)[3..], [(2, 22..25), (6, 0..3), (5, 0..3)]);
    }

    #[test]
    fn no_more_run_than_may_and_those_that_leave_make_room() {
        let mut roster = roster(100, 2);
        for id in 1..=4 {
            roster.start(Sequence { leaves: id == 1, ..prompt(id, 5, 0) }, ());
        }
        assert_eq!(pass(&mut roster), [(1, 0..5), (2, 0..5)]);
        assert_eq!(roster.load(), (1, 2), "the first neither runs nor waits");
        assert_eq!(pass(&mut roster), [(2, 5..6), (3, 0..5)]);
        roster.stop(SequenceId(3));
        assert_eq!(pass(&mut roster), [(2, 6..7), (4, 0..5)]);
        assert_eq!(roster.load(), (2, 0));
    }
}
