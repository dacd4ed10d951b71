//! From a request's body to submissions: what the client wants, checked before any work is done.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use baton_types::{ChainHasher, Sampling};
use bytes::Bytes;
use http::HeaderMap;
use serde_json::value::RawValue;

use crate::backend::{Model, Submission};
use crate::caller::{Caller, fresh_id, namespace};
use crate::chat::{Chat, ChatError};
use crate::config::RouterConfig;
use crate::engine_body::{with_field, without_prompt};
use crate::error::ApiError;
use crate::fields::{Fields, PromptField, UNSERVED};
use crate::output_parsing::OutputPlan;
use crate::plan::{Plan, PlannedPrompt};
use crate::sampling::{self, Endpoint, PromptLength};
use crate::tokenize::{Lineage, Prompt, Tokenization, from_tokens};
use crate::tools;

/// The default `max_tokens` of completions: the API's own figure.
const COMPLETION_TOKENS: u32 = 16;

/// Messages of a chat at most: each costs a template more than its own tokens.
const MAX_MESSAGES: usize = 65_536;

/// Fields that hold an answer of SGLang to a grammar.
const GRAMMARS: [&str; 5] = ["response_format", "json_schema", "regex", "ebnf", "structural_tag"];

/// Bytes of a block's name, long and short.
const BLOCK_BYTES: usize = 24;

/// A call that can be submitted.
pub(crate) struct Call {
    pub(crate) plan: Plan,
    pub(crate) submissions: Vec<Submission>,
    pub(crate) stream: bool,
    pub(crate) explain: bool,
    pub(crate) timeout_us: Option<u64>,
}

impl Call {
    /// Bytes that are held for it until its answers are there: prompts, and the names of their blocks here and where it
    /// is scheduled.
    pub(crate) fn held_bytes(&self) -> usize {
        let prompts = self.plan.prompts.iter().map(|prompt| prompt.tokens.bytes() + prompt.text.len());
        let blocks = self.submissions.iter().map(|submission| submission.chain.len());
        prompts.sum::<usize>() + blocks.map(|blocks| blocks * BLOCK_BYTES).sum::<usize>()
    }
}

/// Reads calls: the settings and parts it needs.
pub(crate) struct RequestReader<'r> {
    pub(crate) config: &'r RouterConfig,
    pub(crate) tokenization: &'r Arc<Tokenization>,
    pub(crate) model: &'r Model,
    pub(crate) endpoint: Endpoint,
}

/// The error of a client whose time limit is over.
pub(crate) fn timed_out() -> ApiError {
    ApiError::new(
        504,
        "the answer was not there in the time that the client gave; give more, or ask for less",
    )
    .code("client_timeout")
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        Self::invalid(error.param, error.message)
    }
}

/// A prompt with what it reads as, for echoing, and whether it opens the answer's reasoning.
struct ReadyPrompt {
    prompt: Prompt,
    text: String,
    reasoning: Option<bool>,
}

impl RequestReader<'_> {
    /// Reads a body into a call, or says what is wrong with it.
    pub(crate) async fn read(
        &self,
        headers: &HeaderMap,
        body: Bytes,
        request_id: &Arc<str>,
    ) -> Result<Call, ApiError> {
        let mut fields = crate::fields::read(&body)?;
        self.check(&fields)?;
        let caller = Caller::read(headers, &fields, self.config, &self.model.name)?;
        let stops = sampling::stops(&mut fields, self.config.stops_limit)?;
        let sampling = sampling::sampling(&fields, self.endpoint, self.model)?;
        let lineage = self.lineage(&caller, &fields);
        let ready = match self.endpoint {
            Endpoint::Chat => vec![self.chat_prompt(&fields, lineage).await?],
            Endpoint::Completions => self.completion_prompts(&mut fields, lineage).await?,
        };
        let body = engine_body(&body, &fields, &ready)?;
        let n = fields.n.unwrap_or(1) as usize;
        self.check_count(ready.len(), n)?;
        let mut submissions = Vec::with_capacity(ready.len() * n);
        for one in &ready {
            let max_tokens = self.room(&fields, PromptLength::Tokens(one.prompt.tokens.len()))?;
            for choice in 0..n {
                let several = ready.len() * n > 1;
                let name = || format!("{request_id}-{}", submissions.len()).into();
                submissions.push(Submission {
                    request_id: if several { name() } else { Arc::clone(request_id) },
                    tokens: one.prompt.tokens.clone(),
                    root: lineage.root,
                    chain: Arc::clone(&one.prompt.chain),
                    sampling: choice_sampling(&sampling, choice, max_tokens),
                    class: caller.class.clone(),
                    class_param: caller.class_param,
                    objectives: caller.objectives,
                    tenant: caller.tenant.clone(),
                    session: caller.session,
                    body: body.clone(),
                    asked_tokens: sampling::asked_tokens(&fields),
                    explain: caller.explain,
                    timeout_us: caller.timeout_us,
                    trace: caller.trace,
                });
            }
        }
        let output = self.output(&fields, &ready);
        let plan = Plan { output, ..self.plan(&fields, &sampling, stops, ready) };
        let stream = fields.stream.unwrap_or(false);
        Ok(Call { plan, submissions, stream, explain: caller.explain, timeout_us: caller.timeout_us })
    }

    /// Checks the fields that do not depend on the prompt.
    fn check(&self, fields: &Fields<'_>) -> Result<(), ApiError> {
        check_model(fields.model.as_ref().map(|text| text.0.as_ref()), self.model)?;
        check_served(fields)?;
        if self.endpoint == Endpoint::Chat && fields.echo == Some(true) {
            return Err(
                ApiError::invalid("echo", "echo is served by /v1/completions").code("unsupported_parameter")
            );
        }
        let n = fields.n.unwrap_or(1);
        if n == 0 {
            return Err(ApiError::invalid("n", "n is 0; it is at least 1"));
        }
        self.check_count(1, n as usize)?;
        if fields.best_of.is_some_and(|best_of| best_of != n) {
            return Err(ApiError::invalid(
                "best_of",
                "best_of differs from n; answers are not ranked here, leave it out",
            ));
        }
        if fields.suffix.as_ref().is_some_and(|suffix| !suffix.0.is_empty()) {
            return Err(ApiError::invalid(
                "suffix",
                "suffix is not served here: no engine fills in the middle",
            ));
        }
        if fields.prompt_logprobs.is_some() && fields.stream == Some(true) {
            return Err(ApiError::invalid("prompt_logprobs", "prompt_logprobs is served without stream"));
        }
        if fields.stream_options.is_some() && fields.stream != Some(true) {
            return Err(ApiError::invalid("stream_options", "stream_options needs stream to be true"));
        }
        self.check_constraints(fields)
    }

    fn check_constraints(&self, fields: &Fields<'_>) -> Result<(), ApiError> {
        if let Some(format) = fields.response_format {
            let kind = format_type(format);
            if kind.is_none() || (kind.as_deref() != Some("text") && !self.model.constrains) {
                let kind = kind.unwrap_or_default();
                let message = format!(
                    "response_format of type {kind:?} is not served here: the engine behind cannot be held to it; use \"text\""
                );
                return Err(ApiError::invalid("response_format", message).code("unsupported_value"));
            }
        }
        tools::check(fields, self.model.constrains)
    }

    fn check_count(&self, prompts: usize, n: usize) -> Result<(), ApiError> {
        let (limit, count) = (self.config.choices_limit, prompts.saturating_mul(n));
        if count <= limit {
            return Ok(());
        }
        let message =
            format!("{count} answers (prompts times n) are more than the {limit} that one call may ask for");
        Err(ApiError::invalid(if n > 1 { "n" } else { "prompt" }, message))
    }

    fn lineage(&self, caller: &Caller, fields: &Fields<'_>) -> Lineage {
        let salt = fields.cache_salt.as_ref().map(|salt| salt.0.as_ref());
        let namespace = namespace(&self.model.revision, caller.tenant.as_deref(), salt);
        let seed = *self.config.hash_seed.expose();
        let root = ChainHasher::new(seed, &namespace).parent();
        Lineage { seed, root, block_tokens: self.model.block_tokens.max(1) }
    }

    async fn chat_prompt(&self, fields: &Fields<'_>, lineage: Lineage) -> Result<ReadyPrompt, ApiError> {
        let text = render_chat(self.tokenization, fields)?;
        let reasoning = self.config.reasoning_parser.reasoning(&text);
        self.check_text(fields, &text)?;
        let add_special_tokens = fields.add_special_tokens.unwrap_or(false);
        let prompt =
            self.tokenization.prompt(text, add_special_tokens, lineage).await.map_err(not_tokenised)?;
        self.check_tokens(prompt.tokens.iter(), "messages")?;
        Ok(ReadyPrompt { prompt, text: String::new(), reasoning })
    }

    async fn completion_prompts(
        &self,
        fields: &mut Fields<'_>,
        lineage: Lineage,
    ) -> Result<Vec<ReadyPrompt>, ApiError> {
        let Some(prompts) = fields.prompt.take() else {
            return Err(ApiError::invalid("prompt", "prompt is missing; send a string or a list"));
        };
        let add_special_tokens = fields.add_special_tokens.unwrap_or(true);
        let echo = fields.echo == Some(true);
        let texts = match prompts {
            PromptField::Text(text) => vec![text],
            PromptField::Texts(texts) => texts,
            PromptField::Tokens(tokens) => {
                self.room(fields, PromptLength::Tokens(tokens.len()))?;
                return Ok(vec![self.token_prompt(&tokens, echo, lineage)?]);
            }
            PromptField::Batches(batches) => {
                self.check_count(batches.len(), 1)?;
                return batches.iter().map(|tokens| self.token_prompt(tokens, echo, lineage)).collect();
            }
        };
        self.check_count(texts.len(), 1)?;
        let mut ready = Vec::with_capacity(texts.len());
        for text in texts {
            self.check_text(fields, &text)?;
            let text = text.into_owned();
            let echoed = if echo { text.clone() } else { String::new() };
            let prompt =
                self.tokenization.prompt(text, add_special_tokens, lineage).await.map_err(not_tokenised)?;
            self.check_tokens(prompt.tokens.iter(), "prompt")?;
            ready.push(ReadyPrompt { prompt, text: echoed, reasoning: None });
        }
        Ok(ready)
    }

    fn token_prompt(&self, tokens: &[u32], echo: bool, lineage: Lineage) -> Result<ReadyPrompt, ApiError> {
        if let Some(token) = tokens.iter().find(|&&token| token >= self.model.vocab_tokens) {
            let message =
                format!("token {token} is not in the vocabulary of {} tokens", self.model.vocab_tokens);
            return Err(ApiError::invalid("prompt", message));
        }
        self.check_tokens(tokens.iter().copied(), "prompt")?;
        let text = if echo { self.tokenization.decode(tokens, true) } else { String::new() };
        Ok(ReadyPrompt { prompt: from_tokens(tokens, &lineage), text, reasoning: None })
    }

    fn check_tokens(&self, tokens: impl Iterator<Item = u32>, param: &'static str) -> Result<(), ApiError> {
        let mut tokens = tokens.peekable();
        if tokens.peek().is_none() {
            return Err(ApiError::invalid(param, "the prompt is empty; it has at least one token"));
        }
        // A tokenizer may know more tokens than the model has been given.
        let spare = self.tokenization.vocab_tokens() > self.model.vocab_tokens;
        if spare && tokens.any(|token| token >= self.model.vocab_tokens) {
            let message =
                "the tokenizer makes tokens that the model does not have; give both the same folder";
            return Err(ApiError::new(500, message).code("tokenizer_mismatch"));
        }
        Ok(())
    }

    /// Refuses a text that is too long however it is tokenised.
    fn check_text(&self, fields: &Fields<'_>, text: &str) -> Result<(), ApiError> {
        self.room(fields, PromptLength::AtLeast(self.tokenization.least_tokens(text.len()))).map(drop)
    }

    fn room(&self, fields: &Fields<'_>, prompt: PromptLength) -> Result<u32, ApiError> {
        let otherwise = (self.endpoint == Endpoint::Completions).then_some(COMPLETION_TOKENS);
        let mut room = sampling::room(fields, prompt, otherwise, self.model);
        if let Err(error) = &mut room
            && self.endpoint == Endpoint::Completions
            && error.param == Some("messages")
        {
            error.param = Some("prompt");
        }
        room
    }

    fn tool_format(&self) -> Option<tools::ToolFormat> {
        self.config.tool_parser.format(self.tokenization.tool_format())
    }

    /// The plan for parsing reasoning and calls out of the answers' text.
    fn output(&self, fields: &Fields<'_>, ready: &[ReadyPrompt]) -> OutputPlan {
        if self.endpoint != Endpoint::Chat {
            return OutputPlan::default();
        }
        let offer = tools::Offer::read(fields, self.tool_format());
        let reasoning = ready.first().and_then(|one| one.reasoning);
        let reasoning = reasoning.filter(|_| fields.separate_reasoning != Some(false));
        let mut texts = offer.as_ref().map_or(Vec::new(), |offer| offer.seen().to_vec());
        if reasoning.is_some() {
            texts.extend_from_slice(self.config.reasoning_parser.seen());
        }
        let seen = self.tokenization.special_tokens(&texts).into();
        let hides_reasoning = fields.include_reasoning == Some(false);
        let format = fields.response_format.and_then(format_type);
        let is_json =
            matches!(format.as_deref(), Some("json_object" | "json_schema")) || tools::is_forced(fields);
        OutputPlan { offer: offer.map(Arc::new), reasoning, is_json, hides_reasoning, seen }
    }

    fn plan(
        &self,
        fields: &Fields<'_>,
        sampling: &Sampling,
        stops: Vec<String>,
        ready: Vec<ReadyPrompt>,
    ) -> Plan {
        let mut ends = sampling.stop_token_ids.clone();
        if !sampling.ignore_eos {
            ends.extend_from_slice(&self.model.end_tokens);
        }
        ends.sort_unstable();
        let mut named_ends = sampling.stop_token_ids.clone();
        named_ends.retain(|token| sampling.ignore_eos || !self.model.end_tokens.contains(token));
        named_ends.sort_unstable();
        let asked = sampling::asked_tokens(fields);
        let echo = fields.echo.unwrap_or(false);
        let options = fields.stream_options.as_ref();
        let prompts =
            ready.into_iter().map(|one| PlannedPrompt { tokens: one.prompt.tokens, text: one.text });
        Plan {
            endpoint: self.endpoint,
            tokenization: Arc::clone(self.tokenization),
            prompts: prompts.collect(),
            id: fresh_id(if self.endpoint == Endpoint::Chat { "chatcmpl-" } else { "cmpl-" }),
            created_s: now_s(),
            model: fields.model.as_ref().map_or_else(|| self.model.name.clone(), |text| text.0.to_string()),
            stops,
            keep_stop: fields.include_stop_str_in_output.or(fields.no_stop_trim).unwrap_or(false),
            skip_special: fields.skip_special_tokens.unwrap_or(true),
            output: OutputPlan::default(),
            min_tokens: sampling.min_tokens,
            ends,
            named_ends,
            echo,
            discards_tokens: asked == Some(0),
            logprobs: sampling.logprobs.is_some(),
            names_by_id: fields.return_tokens_as_token_ids == Some(true),
            tells_ids: fields.return_token_ids == Some(true),
            wants_prompt_logs: sampling.prompt_logprobs.is_some(),
            shows_prompt_logs: fields.prompt_logprobs.is_some(),
            tells_usage: fields.stream != Some(true)
                || options.is_some_and(|options| options.include_usage == Some(true)),
            include_usage: options.and_then(|options| options.include_usage).unwrap_or(false),
            continuous_usage: options.and_then(|options| options.continuous_usage_stats).unwrap_or(false),
            _room: None,
        }
    }
}

/// The chat of a body, as the model reads it.
pub(crate) fn render_chat(tokenization: &Tokenization, fields: &Fields<'_>) -> Result<String, ApiError> {
    let messages = fields.messages.as_deref().unwrap_or_default();
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages is missing or empty; send at least one message"));
    }
    if messages.len() > MAX_MESSAGES {
        let message =
            format!("{} messages are more than the {MAX_MESSAGES} that a chat may have", messages.len());
        return Err(ApiError::invalid("messages", message));
    }
    let plain = |role: &str| {
        let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        !role.is_empty() && role.len() <= 64 && role.bytes().all(word)
    };
    if let Some(message) = messages.iter().find(|message| !plain(&message.role)) {
        let text =
            format!("role {:?} is not one of system, developer, user, assistant and tool", message.role);
        return Err(ApiError::invalid("messages", text));
    }
    if fields.continue_final_message == Some(true) && fields.add_generation_prompt == Some(true) {
        let text =
            "continue_final_message and add_generation_prompt cannot both be true; leave one of them out";
        return Err(ApiError::invalid("continue_final_message", text));
    }
    let chat = Chat {
        messages,
        tools: tools::offered(fields),
        template_kwargs: fields.chat_template_kwargs,
        documents: fields.documents,
        reasoning_effort: fields.reasoning_effort.as_ref().map(|effort| effort.0.as_ref()),
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(true),
        continues: fields.continue_final_message == Some(true),
    };
    Ok(tokenization.render(&chat)?)
}

/// Refuses what would be passed over in silence.
pub(crate) fn check_served(fields: &Fields<'_>) -> Result<(), ApiError> {
    let Some(name) = fields.unserved else { return Ok(()) };
    let remedy =
        UNSERVED.iter().find(|(known, _)| *known == name).map_or("leave it out", |(_, remedy)| remedy);
    let message = format!("{name} is not served here: {remedy}");
    Err(ApiError::invalid(name, message).code("unsupported_parameter"))
}

/// The model asked for is the one that is here; which it is may be left open.
pub(crate) fn check_model(name: Option<&str>, model: &Model) -> Result<(), ApiError> {
    match name {
        Some(name) if name != model.name && !model.aliases.iter().any(|alias| alias == name) => {
            let message = format!("The model `{name}` does not exist here; GET /v1/models says which do.");
            let mut error = ApiError::new(404, message).code("model_not_found");
            error.param = Some("model");
            Err(error)
        }
        _ => Ok(()),
    }
}

/// The client's body for engines, with what the router adds to it.
fn engine_body(body: &[u8], fields: &Fields<'_>, ready: &[ReadyPrompt]) -> Result<Bytes, ApiError> {
    let body = tools::with_schema(without_prompt(body, &fields.entries), fields)?;
    let names = |name: &str| fields.entries.iter().any(|entry| entry.name == name);
    let thinks = ready.first().is_some_and(|one| one.reasoning == Some(true));
    let has_grammar = tools::is_forced(fields) || GRAMMARS.iter().any(|name| names(name));
    if !thinks || !has_grammar || names("require_reasoning") {
        return Ok(body);
    }
    // Else SGLang holds the thought to the answer's grammar.
    Ok(with_field(&body, "\"require_reasoning\":true"))
}

fn format_type(raw: &RawValue) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Format {
        r#type: String,
    }
    serde_json::from_str::<Format>(raw.get()).ok().map(|format| format.r#type)
}

fn choice_sampling(sampling: &Sampling, choice: usize, max_tokens: u32) -> Arc<Sampling> {
    Arc::new(Sampling {
        // Answers to the same prompt are drawn apart from each other, and again alike.
        seed: sampling.seed.wrapping_add(choice as u64),
        // Engines make a token at least; the plan says when it is not wanted.
        max_tokens: max_tokens.max(1),
        ..sampling.clone()
    })
}

fn not_tokenised(message: String) -> ApiError {
    ApiError::new(400, format!("the prompt cannot be tokenised: {message}")).code("tokenize_failed")
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}
