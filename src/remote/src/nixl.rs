//! The parameters of vLLM's NixlConnector after a prefill. They are passed on unchanged, and only when complete. A
//! decode server that gets fewer answers 500, answers wrongly, or exits as a whole.

use serde::Deserialize;
use serde_json::value::RawValue;

/// Longest parameters, bytes.
const MAX_BYTES: usize = 2 << 20;

/// A description of the defect in the parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kv_transfer_params: {0}")]
pub(crate) struct Flaw(String);

/// What the parameters offer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Terms {
    /// Whether the KV is of the whole prompt. Of models with recurrent layers (Mamba) vLLM leaves the last token to the decode
    /// side, and draws one after the token before it, which is not the answer's.
    pub(crate) whole: bool,
    /// When the blocks are released, by a clock of the engine's choice, s.
    pub(crate) expiry_s: Option<f64>,
}

#[derive(Deserialize)]
struct Params {
    do_remote_prefill: bool,
    do_remote_decode: bool,
    remote_block_ids: Blocks,
    remote_engine_id: String,
    remote_request_id: String,
    remote_host: String,
    remote_port: u16,
    remote_num_tokens: u64,
    tp_size: Option<u32>,
    dcp_size: Option<u32>,
    pp_size: Option<u32>,
    remote_blocks_expiry_time: Option<f64>,
    transfer_mode: Option<String>,
}

/// One list of blocks, or one for each group of layers that keeps its KV alike.
#[derive(Deserialize)]
#[serde(untagged)]
enum Blocks {
    Groups(Vec<Vec<u64>>),
    Flat(Vec<u64>),
}

impl Blocks {
    fn most(&self) -> usize {
        match self {
            Self::Groups(groups) => groups.iter().map(Vec::len).max().unwrap_or(0),
            Self::Flat(blocks) => blocks.len(),
        }
    }
}

/// Checks every field that the decode side needs. `block_tokens` is the prefill engine's block size, when known.
pub(crate) fn check(raw: &RawValue, prompt_tokens: u64, block_tokens: Option<u32>) -> Result<Terms, Flaw> {
    if raw.get().len() > MAX_BYTES {
        return Err(Flaw(format!("{} bytes, more than {MAX_BYTES}", raw.get().len())));
    }
    let params: Params = serde_json::from_str(raw.get()).map_err(|error| Flaw(error.to_string()))?;
    let wrong = |text: String| Err(Flaw(text));
    if !params.do_remote_prefill || params.do_remote_decode {
        return wrong(
            "they are not for a decode leg (do_remote_prefill is to be true, do_remote_decode false)".into(),
        );
    }
    for (name, value) in [
        ("remote_engine_id", &params.remote_engine_id),
        ("remote_request_id", &params.remote_request_id),
        ("remote_host", &params.remote_host),
    ] {
        if value.trim().is_empty() {
            return wrong(format!("{name} is empty"));
        }
    }
    if params.remote_port == 0 {
        return wrong("remote_port is 0".into());
    }
    if [params.tp_size, params.dcp_size, params.pp_size].contains(&Some(0)) {
        return wrong("a parallel size is 0".into());
    }
    let held_tokens = params.remote_num_tokens;
    if held_tokens != prompt_tokens && held_tokens.checked_add(1) != Some(prompt_tokens) {
        return wrong(format!("remote_num_tokens is {held_tokens}, and the prompt has {prompt_tokens}"));
    }
    if params.transfer_mode.as_deref().is_some_and(|mode| mode != "pull") {
        return wrong(format!(
            "transfer_mode is {:?}; only pull is spoken",
            params.transfer_mode.unwrap_or_default()
        ));
    }
    let blocks = params.remote_block_ids.most() as u64;
    let room = blocks.saturating_mul(block_tokens.map_or(u64::MAX, u64::from));
    if blocks == 0 || room < held_tokens {
        return wrong(format!("{blocks} blocks do not hold {held_tokens} tokens"));
    }
    let expiry_s = params.remote_blocks_expiry_time.filter(|expiry| expiry.is_finite());
    Ok(Terms { whole: held_tokens == prompt_tokens, expiry_s })
}

/// The name of what is lent.
pub(crate) fn name(raw: &RawValue) -> Option<String> {
    #[derive(Deserialize)]
    struct Name {
        remote_engine_id: String,
        remote_request_id: String,
    }
    let name: Name = serde_json::from_str(raw.get()).ok()?;
    Some(format!("{}/{}", name.remote_engine_id, name.remote_request_id))
}

/// The engine's expiry as µs since 1970, if that is the clock it means: one that is more than a day off is another clock
/// (vLLM's own counts from the machine's start) and says nothing here.
pub(crate) fn expiry_us(terms: Terms, now_us: u64) -> Option<u64> {
    const DAY_US: u64 = 86_400_000_000;
    let expiry = terms.expiry_s? * 1e6;
    let near = now_us.saturating_sub(DAY_US) as f64..=now_us.saturating_add(DAY_US) as f64;
    // Within the range it is positive and far below 2^63.
    near.contains(&expiry).then_some(expiry as u64)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The first answer of pd_nixl.json, vLLM 0.32.
    fn seen() -> Value {
        json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1]],
            "remote_engine_id": "c0536093-7758-4262-b6b0-745c515b8881", "remote_request_id": "cmpl-nixl-20-101-0-b21cfe72",
            "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
            "remote_num_tokens": 20, "remote_blocks_expiry_time": null, "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0})
    }

    fn checked(params: &Value) -> Result<Terms, Flaw> {
        check(&RawValue::from_string(params.to_string()).unwrap(), 20, Some(32))
    }

    #[test]
    fn what_was_seen_passes() {
        assert_eq!(checked(&seen()), Ok(Terms { whole: true, expiry_s: None }));
        let raw = RawValue::from_string(seen().to_string()).unwrap();
        assert_eq!(name(&raw).unwrap(), "c0536093-7758-4262-b6b0-745c515b8881/cmpl-nixl-20-101-0-b21cfe72");
        let mut older = seen();
        older["remote_block_ids"] = json!([4]);
        older.as_object_mut().unwrap().remove("dcp_size");
        assert!(checked(&older).is_ok());
    }

    #[test]
    fn the_last_token_may_be_left_to_the_decode_side() {
        let mut params = seen();
        params["remote_num_tokens"] = json!(19);
        assert_eq!(checked(&params), Ok(Terms { whole: false, expiry_s: None }));
        let raw = RawValue::from_string(params.to_string()).unwrap();
        assert!(check(&raw, 20, Some(19)).is_ok() && check(&raw, 20, Some(18)).is_err());
    }

    #[test]
    fn every_missing_or_wrong_field_is_found() {
        for name in [
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "remote_num_tokens",
        ] {
            let mut params = seen();
            params.as_object_mut().unwrap().remove(name);
            assert!(checked(&params).unwrap_err().to_string().contains(name), "{name}");
            for wrong in [json!(null), json!({}), json!("")] {
                params[name] = wrong;
                assert!(checked(&params).is_err(), "{params}");
            }
        }
        for (name, wrong) in [
            ("do_remote_prefill", json!(false)),
            ("do_remote_decode", json!(true)),
            ("remote_block_ids", json!([])),
            ("remote_block_ids", json!([[]])),
            ("remote_block_ids", json!([["a"]])),
            ("remote_block_ids", json!([[-1]])),
            ("remote_port", json!(0)),
            ("remote_port", json!(65_536)),
            ("remote_num_tokens", json!(18)),
            ("remote_num_tokens", json!(21)),
            ("tp_size", json!(0)),
            ("tp_size", json!("1")),
            ("transfer_mode", json!("push")),
        ] {
            let mut params = seen();
            params[name] = wrong;
            assert!(checked(&params).is_err(), "{params}");
        }
    }

    #[test]
    fn too_few_blocks_are_noticed() {
        let mut params = seen();
        params["remote_num_tokens"] = json!(65);
        let raw = |params: &Value| RawValue::from_string(params.to_string()).unwrap();
        params["remote_block_ids"] = json!([[1, 2]]);
        assert!(check(&raw(&params), 65, Some(32)).is_err());
        params["remote_block_ids"] = json!([[1, 2, 3], [9]]);
        assert!(check(&raw(&params), 65, Some(32)).is_ok());
    }

    #[test]
    fn an_expiry_counts_when_it_is_of_our_clock() {
        let now = 1_795_230_029_000_000;
        let of = |expiry| expiry_us(Terms { whole: true, expiry_s: expiry }, now);
        assert_eq!(of(Some(1_795_230_059.0)), Some(1_795_230_059_000_000));
        assert_eq!((of(Some(81_234.5)), of(None), of(Some(-1.0))), (None, None, None));
    }
}
