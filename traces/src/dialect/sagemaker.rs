//! Amazon SageMaker data capture: the bodies of a chat request and its answer, in one row.

use serde::Deserialize;
use serde_json::Value;

use crate::dialect::mooncake::text_prompt;
use crate::error::RowFault;
use crate::flat::{json_fault, texts_of_payload};
use crate::moment::iso_ms;
use crate::parser::{Parse, Row, Setup, length, required};
use crate::prompt::{mix, own_id};
use crate::record::{Extra, Record};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Capture {
    capture_data: CaptureData,
    event_metadata: EventMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CaptureData {
    endpoint_input: Body,
    endpoint_output: Option<Body>,
}

#[derive(Deserialize)]
struct Body {
    data: String,
    #[serde(default)]
    encoding: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EventMetadata {
    event_id: Option<String>,
    inference_time: String,
}

/// Reads captures. Lengths come from the answer's usage where it has one.
pub(crate) struct Sagemaker {
    setup: Setup,
    estimated: u64,
}

impl Sagemaker {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { setup: setup.clone(), estimated: 0 }
    }
}

impl Body {
    fn json(&self) -> Result<Value, RowFault> {
        let bytes = match self.encoding.as_deref() {
            Some("BASE64") => base64(self.data.as_bytes())
                .ok_or_else(|| RowFault::parse("the body is not valid base64", "fix or remove the row"))?,
            _ => self.data.clone().into_bytes(),
        };
        serde_json::from_slice(&bytes).map_err(json_fault)
    }
}

/// Decodes standard base64; `None` where a character is not of its alphabet.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0u32);
    for &c in text.iter().filter(|c| !c.is_ascii_whitespace() && **c != b'=') {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count & 0xff) as u8);
        }
    }
    Some(out)
}

/// Cuts ids to the true length of the prompt, or fills them up with ids of this request alone.
pub(crate) fn fit_ids(ids: &mut Vec<u64>, tokens: u64, block_tokens: u32) {
    let wanted = usize::try_from(tokens.div_ceil(u64::from(block_tokens))).unwrap_or(usize::MAX);
    ids.truncate(wanted);
    let mut chain = ids.iter().fold(tokens, |c, &id| mix(c, id));
    while ids.len() < wanted {
        chain = mix(chain, ids.len() as u64);
        ids.push(own_id(chain));
    }
}

impl Parse for Sagemaker {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let capture: Capture = serde_json::from_slice(row.json()?).map_err(json_fault)?;
        let request = capture.capture_data.endpoint_input.json()?;
        let answer = required(capture.capture_data.endpoint_output, "captureData.endpointOutput")?.json()?;
        let usage = |field: &str| answer.get("usage").and_then(|u| u.get(field)).and_then(Value::as_i64);
        let limits = &self.setup.limits;
        let output = required(usage("completion_tokens"), "usage.completion_tokens")?;
        let mut texts = Vec::new();
        texts_of_payload(&request, &mut texts);
        let prompt = text_prompt(&texts, self.setup.block_tokens);
        let (mut hash_ids, mut input_length) = (prompt.ids(), prompt.tokens());
        match usage("prompt_tokens") {
            Some(tokens) => {
                input_length = length(tokens, "usage.prompt_tokens", limits)?;
                fit_ids(&mut hash_ids, input_length, self.setup.block_tokens);
            }
            None => self.estimated += 1,
        }
        let time = &capture.event_metadata.inference_time;
        let timestamp_ms = iso_ms(time)
            .ok_or_else(|| RowFault::parse(format!("{time:?} is not a time"), "fix or remove the row"))?;
        let mut extra = Extra { request_id: capture.event_metadata.event_id, ..Extra::default() };
        if let Some(model) = request.get("model") {
            extra.unknown.insert("model".into(), model.clone());
        }
        out.push(Record {
            timestamp_ms,
            input_length,
            output_length: length(output, "usage.completion_tokens", limits)?,
            hash_ids,
            extra: Some(Box::new(extra)),
        });
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        let mut notes =
            vec!["ids follow from the text at 4 bytes a token; the text itself is not carried".to_string()];
        if self.estimated > 0 {
            notes.push(format!(
                "{} rows have no usage.prompt_tokens: estimated at 4 bytes a token",
                self.estimated
            ));
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_decodes_with_and_without_padding() {
        assert_eq!(base64(b"aGVsbG8=").unwrap(), b"hello");
        assert_eq!(base64(b"aGVsbG8").unwrap(), b"hello");
        assert!(base64(b"a*b").is_none());
    }

    #[test]
    fn fitted_ids_have_the_true_length_and_keep_the_prefix() {
        let mut ids = vec![1, 2, 3];
        fit_ids(&mut ids, 5, 4);
        assert_eq!(ids, [1, 2]);
        fit_ids(&mut ids, 13, 4);
        assert_eq!(ids.len(), 4);
        assert_eq!(ids[..2], [1, 2]);
    }
}
