//! `/tokenize` and `/detokenize`: texts and tokens turned into one another, and nothing else done with them.

use std::sync::Arc;

use baton_types::{BlockKey, Tokens};

use crate::backend::Model;
use crate::call;
use crate::error::ApiError;
use crate::fields::{self, Fields, PromptField};
use crate::json;
use crate::sampling::{self, PromptLength};
use crate::tokenize::{Lineage, Tokenization};

/// The response of `/tokenize`.
pub(crate) async fn tokenize(
    tokenization: &Arc<Tokenization>,
    model: Option<&Model>,
    body: &[u8],
) -> Result<Vec<u8>, ApiError> {
    let fields = fields::read(body)?;
    call::check_served(&fields)?;
    let tokens = match (&fields.prompt, &fields.messages) {
        (Some(PromptField::Text(text)), None) => {
            let add_special_tokens = fields.add_special_tokens.unwrap_or(true);
            check_text(tokenization, model, ("prompt", text))?;
            tokens(tokenization, text.to_string(), add_special_tokens).await?
        }
        (None, Some(_)) => {
            let text = call::render_chat(tokenization, &fields)?;
            check_text(tokenization, model, ("messages", &text))?;
            tokens(tokenization, text, fields.add_special_tokens.unwrap_or(false)).await?
        }
        _ => return Err(ApiError::invalid("prompt", "send either prompt, as a string, or messages")),
    };
    let mut out = b"{\"count\":".to_vec();
    json::integer(&mut out, tokens.len() as u64);
    out.extend_from_slice(b",\"max_model_len\":");
    match model {
        Some(model) => json::integer(&mut out, u64::from(model.max_model_tokens)),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(b",\"tokens\":[");
    for (at, token) in tokens.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        json::integer(&mut out, u64::from(token));
    }
    out.extend_from_slice(b"]}");
    Ok(out)
}

/// Refuses a text that is too long for the model however it is tokenised.
fn check_text(
    tokenization: &Tokenization,
    model: Option<&Model>,
    (param, text): (&'static str, &str),
) -> Result<(), ApiError> {
    let Some(model) = model else { return Ok(()) };
    let length = PromptLength::AtLeast(tokenization.least_tokens(text.len()));
    let fits = sampling::room(&Fields::default(), length, None, model).map(drop);
    fits.map_err(|error| ApiError { param: Some(param), ..error })
}

async fn tokens(
    tokenization: &Arc<Tokenization>,
    text: String,
    add_special_tokens: bool,
) -> Result<Tokens, ApiError> {
    // Blocks as long as can be: only the tokens are wanted.
    let lineage = Lineage { seed: 0, root: BlockKey(0), block_tokens: u32::MAX };
    let prompt = tokenization.prompt(text, add_special_tokens, lineage).await;
    prompt.map(|prompt| prompt.tokens).map_err(|message| ApiError::invalid("prompt", message))
}

/// The response of `/detokenize`.
pub(crate) fn detokenize(tokenization: &Tokenization, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let fields = fields::read(body)?;
    let Fields { tokens: Some(tokens), .. } = &fields else {
        return Err(ApiError::invalid("tokens", "tokens is missing; send a list of token ids"));
    };
    let text = tokenization.decode(tokens, fields.skip_special_tokens.unwrap_or(false));
    let mut out = b"{\"prompt\":".to_vec();
    json::string(&mut out, &text);
    out.push(b'}');
    Ok(out)
}
