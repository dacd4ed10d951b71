//! A client's body for engines, without what they are told as tokens.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::value::RawValue;

/// Fields that the front door has made tokens of: the prompt, which may be most of a body, and what went into it.
const IN_THE_TOKENS: [&str; 9] =
    ["messages", "prompt", "tokens", "text", "input_ids", "tools", "functions", "documents", "chat_template"];

/// The body without those. Others keep their own bytes; of a name that stands twice the last value counts, as for the
/// front door. What is no JSON object stays as it is: the engine's side says so.
pub(super) fn strip_prompt_fields(body: &Bytes) -> Bytes {
    let Ok(mut fields) = serde_json::from_slice::<BTreeMap<String, &RawValue>>(body) else {
        return body.clone();
    };
    fields.retain(|name, _| !IN_THE_TOKENS.contains(&name.as_str()));
    serde_json::to_vec(&fields).map_or_else(|_| body.clone(), Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &str) -> String {
        String::from_utf8(strip_prompt_fields(&Bytes::copy_from_slice(body.as_bytes())).to_vec()).unwrap()
    }

    #[test]
    fn what_became_tokens_stays_and_the_rest_goes_along_in_its_own_bytes() {
        let body = r#"{"model":"m","messages":[{"role":"user","content":"a \"b\""}],"vendor":{"b":1.10,"a":[1e400,"\u00e9"]},"tools":[],"seed": 7}"#;
        assert_eq!(of(body), r#"{"model":"m","seed":7,"vendor":{"b":1.10,"a":[1e400,"\u00e9"]}}"#);
        assert_eq!(of(r#"{"m\u0065ssages":[1],"a":1,"a":2}"#), r#"{"a":2}"#);
    }

    #[test]
    fn nothing_is_left_out_that_an_engine_would_be_told() {
        for name in IN_THE_TOKENS {
            let rule = baton_remote::rule(name);
            assert!(matches!(rule, Some(baton_remote::Rule::Ours | baton_remote::Rule::Served)), "{name}");
        }
    }

    #[test]
    fn what_is_no_object_stays_as_it_is() {
        for body in ["", "[1]", "{", "\u{fffd}"] {
            assert_eq!(of(body), body);
        }
    }
}
