//! An order's work as a request to an engine.

use std::sync::Arc;

use baton_remote::{ClientBody, Dialect, Request};
use baton_types::{BlockKey, Sampling};
use baton_wire::v1;

use super::follower::salt_of;
use super::prompts::Prompts;
use crate::node::error::OrderError;
use crate::node::job::{Job, block_keys};

/// The work of a leg.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) request: Request,
    /// Answer tokens that are part of its prompt: it goes on from there.
    pub(super) given: u32,
    /// Keys of the full blocks.
    pub(super) chain: Vec<BlockKey>,
    /// Prompt tokens that the conductor expects in the engine's cache.
    pub(super) expected_tokens: Option<u64>,
}

/// Fields whose meaning depends on the answer so far, which an engine takes for prompt when it goes on from there.
const BOUND_TO_ANSWER: [&str; 10] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
];

impl Work {
    /// The memory and blocks that it needs on its node.
    pub(super) fn asks(&self, room_tokens: u32) -> baton_legs::Work {
        baton_legs::Work {
            prompt_tokens: self.request.tokens.len() as u64,
            named_blocks: u32::try_from(self.chain.len()).unwrap_or(u32::MAX),
            room_tokens,
        }
    }

    /// The work of an order. `naming` is the seed of the block keys and the tokens in a block.
    ///
    /// # Errors
    /// When it makes no sense on any node.
    pub(super) fn new(
        work: Option<v1::Work>,
        naming: (u64, u32),
        prompts: &Prompts,
        dialect: Dialect,
    ) -> Result<Self, OrderError> {
        let mut work = work.ok_or(OrderError::Work)?;
        let id = Arc::<str>::from(work.request_id.as_str());
        let (tokens, body) = (std::mem::take(&mut work.tokens), std::mem::take(&mut work.body));
        let (tokens, body) = prompts.of(tokens, body).ok_or(OrderError::Torn)?;
        let job = Job::expected(0, Some(work), 0, naming.1)?;
        if tokens.len() != job.token_count {
            return Err(OrderError::Count { tokens: tokens.len(), announced: job.token_count });
        }
        let chain = match job.chain.is_empty() {
            true => block_keys(&tokens, job.root, naming),
            false => job.chain,
        };
        let given = u32::try_from(tokens.len() - job.prompt_tokens as usize).unwrap_or(u32::MAX);
        let sampling =
            if given == 0 { job.sampling } else { Arc::new(resumed(&job.sampling, given, &body, dialect)?) };
        let request = Request { id, tokens, sampling, body, salt: Some(salt_of(job.root).into()) };
        Ok(Self { request, given, chain, expected_tokens: None })
    }
}

/// The settings of an answer that goes on after `given` tokens.
///
/// # Errors
/// When the engine would draw the rest otherwise than it would have drawn it in one go.
fn resumed(
    sampling: &Sampling,
    given: u32,
    body: &ClientBody,
    dialect: Dialect,
) -> Result<Sampling, OrderError> {
    // vLLM's repetition penalty counts the prompt too, SGLang's the answer only.
    let repetition = dialect == Dialect::Sglang && sampling.repetition_penalty != 1.0;
    if repetition || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 {
        return Err(OrderError::Penalties);
    }
    let Some(left) = sampling.max_tokens.checked_sub(given).filter(|left| *left > 0) else {
        return Err(OrderError::Whole);
    };
    if let Some(name) = BOUND_TO_ANSWER.iter().find(|name| body.sets(name)) {
        return Err(OrderError::Bound(name));
    }
    Ok(Sampling {
        max_tokens: left,
        min_tokens: sampling.min_tokens.saturating_sub(given),
        // They came before the first token.
        prompt_logprobs: None,
        ..sampling.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(work: impl Into<Option<v1::Work>>) -> Result<Work, OrderError> {
        Work::new(work.into(), (0, 2), &Prompts::default(), Dialect::Vllm)
    }

    fn order(prompt: &[u32], answer: &[u32], sampling: &Sampling) -> v1::Work {
        let tokens = baton_wire::pack_tokens(&baton_types::Tokens::from(prompt).and(answer));
        v1::Work {
            tokens,
            token_count: (prompt.len() + answer.len()) as u32,
            prompt_tokens: prompt.len() as u32,
            sampling: Some(sampling.into()),
            request_id: "r".into(),
            root: baton_wire::pack_keys(&[BlockKey(5)]),
            ..v1::Work::default()
        }
    }

    #[test]
    fn what_was_drawn_elsewhere_is_prompt_and_counts() {
        let sampling =
            Sampling { max_tokens: 10, min_tokens: 4, prompt_logprobs: Some(1), ..Sampling::default() };
        let work = new(order(&[1, 2, 3], &[4, 5], &sampling)).unwrap();
        assert_eq!(&work.request.tokens[..], &[1, 2, 3, 4, 5]);
        assert_eq!((work.given, work.chain.len()), (2, 2), "engines keep what they are given");
        let sampling = &work.request.sampling;
        assert_eq!((sampling.max_tokens, sampling.min_tokens, sampling.prompt_logprobs), (8, 2, None));
    }

    #[test]
    fn an_answer_that_would_go_on_otherwise_does_not() {
        let plain = Sampling { max_tokens: 10, ..Sampling::default() };
        let penal = Sampling { presence_penalty: 0.5, ..plain.clone() };
        assert!(new(order(&[1, 2], &[3], &penal)).unwrap_err().to_string().contains("penalties"));
        assert!(new(order(&[1, 2], &[], &penal)).is_ok());
        for name in BOUND_TO_ANSWER {
            // A number that no f64 holds is the engine's to refuse.
            let body = format!(r#"{{"vendor":1e400,"{name}":{{"type":"json_object"}},"none":null}}"#);
            let bound = v1::Work { body: body.into_bytes().into(), ..order(&[1, 2], &[3], &plain) };
            assert!(new(bound).unwrap_err().to_string().contains(name));
        }
        let none =
            v1::Work { body: br#"{"guided_json":null}"#.to_vec().into(), ..order(&[1, 2], &[3], &plain) };
        assert!(new(none).is_ok());
        let full = Sampling { max_tokens: 1, ..plain };
        assert!(new(order(&[1, 2], &[3], &full)).unwrap_err().to_string().contains("all its tokens"));
    }

    /// An answer that went on at another SGLang could repeat what it had said before, in silence.
    #[test]
    fn an_answer_whose_repetitions_sglang_penalises_does_not_go_on() {
        let sampling = Sampling { max_tokens: 10, repetition_penalty: 1.2, ..Sampling::default() };
        let go_on = |dialect, answer: &[u32]| {
            Work::new(Some(order(&[1, 2], answer, &sampling)), (0, 2), &Prompts::default(), dialect)
        };
        assert!(go_on(Dialect::Sglang, &[3]).unwrap_err().to_string().contains("penalties"));
        assert!(go_on(Dialect::Sglang, &[]).is_ok());
        assert!(go_on(Dialect::Vllm, &[3]).is_ok());
    }

    #[test]
    fn the_engine_keeps_apart_what_has_different_roots() {
        let salt = |root| {
            let root = baton_wire::pack_keys(&[BlockKey(root)]);
            let order = v1::Work { root, ..order(&[1], &[], &Sampling::default()) };
            new(order).unwrap().request.salt.unwrap()
        };
        assert_eq!(salt(1), salt(1));
        assert_ne!(salt(1), salt(2));
    }

    #[test]
    fn senseless_orders_are_refused() {
        assert!(new(None).is_err());
        let torn = v1::Work { token_count: 9, ..order(&[1, 2], &[], &Sampling::default()) };
        assert!(new(torn).is_err());
    }
}
