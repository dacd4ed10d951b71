//! One answer as it grows: tokens in, text and logprobs out.

use baton_types::{Finish, TokenLogprob};

use crate::output_parsing::OutputParser;
use crate::plan::Plan;
use crate::stops::StopWatch;
use crate::tokenize::{Detokenizer, PROMPT_TAIL};

/// A token with what is said of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenLog {
    pub(crate) token: u32,
    /// `None` for a prompt's first token, which nothing comes before.
    pub(crate) logprob: Option<TokenLogprob>,
    /// Where its text begins, in bytes and in characters.
    start_bytes: usize,
    pub(crate) start_chars: usize,
}

/// Bytes that a token's log takes.
fn log_bytes(logprob: Option<&TokenLogprob>) -> usize {
    size_of::<TokenLog>() + logprob.map_or(0, |logprob| size_of_val(logprob.top.as_slice()))
}

/// The client's stop string or stop token that ended the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    Text(Box<str>),
    Token(u32),
}

/// The state of one answer.
#[derive(Debug)]
pub(crate) struct Answer {
    detokenizer: Detokenizer,
    watch: StopWatch,
    /// Text that can be shown and was not yet taken; where there is more to an answer, nothing.
    pub(crate) shown: String,
    /// The parser of the answer's text, where it may contain reasoning or calls.
    pub(crate) output: Option<OutputParser>,
    shown_bytes: usize,
    raw_bytes: usize,
    raw_chars: usize,
    /// Bytes that its text, tokens and logprobs took as they came.
    pub(crate) grown_bytes: usize,
    /// Reused for each token's text.
    piece: String,
    logs: Vec<TokenLog>,
    prompt_at: usize,
    echoed: bool,
    /// The prompt's logprobs, when they were asked for and have come.
    pub(crate) prompt_logs: Vec<TokenLog>,
    /// Tokens of the answer so far.
    pub(crate) completion_tokens: u64,
    /// Those of them that a stream's client has had an event for.
    pub(crate) written_tokens: u64,
    /// As the engine counted them; unknown until it says.
    pub(crate) cached_tokens: Option<u64>,
    /// Why it ended.
    pub(crate) finish: Option<Finish>,
    /// By which of the ends that the client had named.
    pub(crate) stop_reason: Option<StopReason>,
    last_token: Option<u32>,
    /// Its tokens that were not yet taken, where the client wants them.
    pub(crate) ids: Vec<u32>,
    /// A stream's client has been given the prompt's tokens.
    pub(crate) prompt_sent: bool,
    /// A stream's client has heard that it ended.
    pub(crate) end_sent: bool,
}

impl Answer {
    /// The answer to the plan's prompt at `prompt_at`.
    pub(crate) fn new(plan: &Plan, prompt_at: usize) -> Self {
        let prompt = &plan.prompts[prompt_at].tokens;
        let tail = prompt.after(prompt.len().saturating_sub(PROMPT_TAIL));
        let mut answer = Self {
            detokenizer: Detokenizer::seeing(plan.skip_special, plan.output.seen.clone())
                .after(&plan.tokenization, &tail),
            watch: StopWatch::new(&plan.stops, plan.keep_stop),
            shown: String::new(),
            output: (!plan.output.is_plain()).then(|| OutputParser::new(&plan.output)),
            shown_bytes: 0,
            raw_bytes: 0,
            raw_chars: 0,
            grown_bytes: 0,
            piece: String::new(),
            logs: Vec::new(),
            prompt_at,
            echoed: !plan.echo,
            prompt_logs: Vec::new(),
            completion_tokens: 0,
            written_tokens: 0,
            cached_tokens: None,
            finish: None,
            stop_reason: None,
            last_token: None,
            ids: Vec::new(),
            prompt_sent: !plan.tells_ids,
            end_sent: false,
        };
        if !plan.wants_prompt_logs {
            answer.echo(plan, &[]);
        }
        answer
    }

    /// The prompt that it answers, by place in the call.
    pub(crate) fn prompt_at(&self) -> usize {
        self.prompt_at
    }

    /// Takes in the logprobs of the prompt's tokens but the first.
    pub(crate) fn prompt_logprobs(&mut self, plan: &Plan, logprobs: &[TokenLogprob]) {
        let mut detokenizer = Detokenizer::new(plan.skip_special);
        let (mut start_bytes, mut start_chars, mut piece) = (0, 0, String::new());
        for (at, token) in plan.prompts[self.prompt_at].tokens.iter().enumerate() {
            let logprob = at.checked_sub(1).and_then(|before| logprobs.get(before)).cloned();
            self.grown_bytes += log_bytes(logprob.as_ref());
            self.prompt_logs.push(TokenLog { token, logprob, start_bytes, start_chars });
            piece.clear();
            detokenizer.push(&plan.tokenization, token, &mut piece);
            start_bytes += piece.len();
            start_chars += piece.chars().count();
        }
        let logs = std::mem::take(&mut self.prompt_logs);
        self.echo(plan, &logs);
        self.prompt_logs = logs;
    }

    /// Shows the prompt, once, when it is wanted.
    fn echo(&mut self, plan: &Plan, logs: &[TokenLog]) {
        if self.echoed {
            return;
        }
        self.echoed = true;
        let text = &plan.prompts[self.prompt_at].text;
        self.shown.push_str(text);
        self.shown_bytes = text.len();
        self.raw_bytes = text.len();
        self.raw_chars = text.chars().count();
        if plan.logprobs {
            self.logs.extend_from_slice(logs);
        }
    }

    /// Takes in the next token. After the one that ends the answer, `finish` says why.
    pub(crate) fn token(&mut self, plan: &Plan, token: u32, logprob: Option<TokenLogprob>) {
        self.echo(plan, &[]);
        if plan.discards_tokens {
            return;
        }
        self.completion_tokens += 1;
        self.last_token = Some(token);
        if plan.tells_ids {
            self.ids.push(token);
            self.grown_bytes += size_of::<u32>();
        }
        if plan.is_end(token) && !plan.keep_stop {
            return;
        }
        self.piece.clear();
        self.detokenizer.push(&plan.tokenization, token, &mut self.piece);
        self.grown_bytes += self.piece.len();
        if plan.logprobs {
            self.grown_bytes += log_bytes(logprob.as_ref());
            let (start_bytes, start_chars) = (self.raw_bytes, self.raw_chars);
            self.logs.push(TokenLog { token, logprob, start_bytes, start_chars });
        }
        let armed = self.completion_tokens > u64::from(plan.min_tokens);
        self.show_piece(armed);
        self.parse_shown();
    }

    /// The engine says that the answer is over.
    pub(crate) fn finished(&mut self, plan: &Plan, finish: Finish, cached_tokens: u64) {
        self.echo(plan, &[]);
        self.cached_tokens = Some(cached_tokens);
        self.piece.clear();
        // The bytes of an unfinished character at a prompt's end are no answer.
        if self.completion_tokens > 0 {
            self.detokenizer.finish(&plan.tokenization, &mut self.piece);
        }
        self.show_piece(true);
        if self.finish.is_none() {
            let before = self.shown.len();
            self.watch.finish(&mut self.shown);
            self.shown_bytes += self.shown.len() - before;
            self.finish = Some(if plan.discards_tokens { Finish::Length } else { finish });
            let named = self.last_token.filter(|token| plan.named_ends.binary_search(token).is_ok());
            self.stop_reason = named.filter(|_| finish == Finish::Stop).map(StopReason::Token);
        }
        self.parse_shown();
    }

    fn show_piece(&mut self, armed: bool) {
        self.raw_bytes += self.piece.len();
        self.raw_chars += self.piece.chars().count();
        let before = self.shown.len();
        if !armed {
            self.shown.push_str(&self.piece);
        } else if let Some(stop) = self.watch.push(&self.piece, &mut self.shown) {
            self.finish = Some(Finish::Stop);
            self.stop_reason = Some(StopReason::Text(stop.into()));
        }
        self.shown_bytes += self.shown.len() - before;
    }

    /// Reads what can be shown.
    fn parse_shown(&mut self) {
        if let Some(output) = &mut self.output {
            output.push(&self.shown);
            self.shown.clear();
            if self.finish.is_some() {
                output.finish();
            }
        }
    }

    /// Why it ended, in the API's word.
    pub(crate) fn finish_name(&self) -> Option<&'static str> {
        let calls = || self.output.as_ref().is_some_and(OutputParser::has_calls);
        self.finish.map(|finish| if finish == Finish::Stop && calls() { "tool_calls" } else { finish.name() })
    }

    /// Takes out what is said of the tokens whose text is shown; at the end, of all but those that a
    /// stop string took away.
    pub(crate) fn take_logs(&mut self) -> Vec<TokenLog> {
        let cut = self.raw_bytes > self.shown_bytes;
        let ready = if self.finish.is_some() && !cut {
            self.logs.len()
        } else {
            self.logs.partition_point(|log| log.start_bytes < self.shown_bytes)
        };
        self.logs.drain(..ready).collect()
    }
}
