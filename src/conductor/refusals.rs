//! What a client reads of a refusal: status, words, and the header at fault.

use baton_scheduler::{RejectReason, Rejection};
use baton_types::SloClass;

/// A refusal as its client reads it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RefusalText {
    pub status: u16,
    pub message: String,
    /// The header at fault, where the request named an objective that cannot be kept.
    pub param: Option<&'static str>,
}

impl From<(u16, String)> for RefusalText {
    fn from((status, message): (u16, String)) -> Self {
        Self { status, message, param: None }
    }
}

/// A refused request, as far as the words need it.
pub(super) struct RefusedRequest<'a> {
    pub prompt_tokens: u64,
    /// Tokens of its answer that its client has.
    pub answer_tokens: u64,
    /// What its client asks for, if it says so, tokens.
    pub asked_tokens: Option<u32>,
    pub objectives: baton_types::RequestObjectives,
    pub class: &'a SloClass,
    /// The least TBT that a request of its class can be promised, µs.
    pub least_tbt_us: u64,
    /// A decode step of its prompt on an idle node, µs.
    pub idle_step_us: Option<u64>,
}

/// A refusal in words.
pub(super) fn refusal_text(rejection: &Rejection, request: &RefusedRequest<'_>) -> RefusalText {
    let wait = format!("predicted to be admitted in {:.1} s", rejection.retry_after_us as f64 / 1e6);
    let seconds = |us: u64| format!("{:.2} s", us as f64 / 1e6);
    let ttft = rejection.predicted_ttft_us.map_or_else(|| "none".into(), seconds);
    let text = match rejection.reason {
        RejectReason::Ttft => {
            (429, format!("no placement meets the time-to-first-token objective (best {ttft}); {wait}"))
        }
        RejectReason::Tbt => {
            (429, format!("decoding it now would break the time-between-tokens objective; {wait}"))
        }
        RejectReason::Room => (429, format!("no decode instance has room for its KV; {wait}")),
        RejectReason::Costly => {
            (429, format!("under the present overload its place is worth more to others; {wait}"))
        }
        RejectReason::Unreachable => return unreachable_text(rejection, request),
        RejectReason::QueueFull => {
            let message =
                "as many requests are under way as scheduler.max_waiting_requests allows; try again in";
            (429, format!("{message} {:.1} s", rejection.retry_after_us as f64 / 1e6))
        }
        RejectReason::NoInstance => {
            (503, "no prefill and decode instance pair is attached; see /ready and start nodes".into())
        }
        RejectReason::TooLong => (400, too_long_text(request)),
    };
    text.into()
}

/// Prompt and answer count together, for a decode instance holds the KV of both.
fn too_long_text(request: &RefusedRequest<'_>) -> String {
    let RefusedRequest { prompt_tokens, answer_tokens, .. } = *request;
    if answer_tokens > 0 {
        return format!(
            "the prompt has {prompt_tokens} tokens and its answer {answer_tokens} by now: together more than any \
             instance can hold"
        );
    }
    match request.asked_tokens.filter(|asked| *asked > 1) {
        Some(asked) => format!(
            "the prompt has {prompt_tokens} tokens and {asked} are asked for: together more than any instance can \
             hold; send a shorter prompt or ask for fewer tokens"
        ),
        None => format!(
            "the prompt has {prompt_tokens} tokens, more than any instance can hold; send a shorter prompt"
        ),
    }
}

/// Objectives that cannot be kept whatever else is served, and what would be predicted.
fn unreachable_text(rejection: &Rejection, request: &RefusedRequest<'_>) -> RefusalText {
    let RefusedRequest { objectives, class, least_tbt_us, .. } = request;
    let (ttft_us, tbt_us) = objectives.in_force(class);
    let [ttft_header, tbt_header] = baton_router::OBJECTIVE_HEADERS;
    if objectives.tbt_us.is_some_and(|own_us| own_us < *least_tbt_us) {
        // The header is in whole milliseconds.
        let least_ms = least_tbt_us.div_ceil(1_000);
        let message = format!(
            "the request asks for {} between tokens ({tbt_header}). Requests that are decoded together share steps, and \
             those of class {:?} may take {}: ask for {least_ms} ms or more, or for nothing",
            in_units(tbt_us),
            class.name,
            in_units(*least_tbt_us),
        );
        return RefusalText { status: 400, message, param: Some(tbt_header) };
    }
    let kept_free = match class.headroom_permille {
        0 => String::new(),
        permille => format!(", less {} % kept free for higher bands,", f64::from(permille) / 10.0),
    };
    let predicted = |us: Option<u64>| us.map_or_else(|| "none".into(), in_units);
    let message = format!(
        "its objectives cannot be met here even when nothing else is served: a first token within {}{kept_free} and {} \
         between tokens; {} and {} are predicted. Send a shorter prompt, ask for longer objectives, or choose a class \
         that has them",
        in_units(ttft_us),
        in_units((*least_tbt_us).min(tbt_us)),
        predicted(rejection.predicted_ttft_us),
        predicted(request.idle_step_us),
    );
    let slow_steps = request.idle_step_us.is_some_and(|step_us| step_us > *least_tbt_us);
    let own_ttft = objectives.ttft_us.is_some() && !slow_steps;
    RefusalText { status: 400, message, param: own_ttft.then_some(ttft_header) }
}

/// A time as people write it: tenths of milliseconds below a second.
fn in_units(us: u64) -> String {
    if us < 1_000_000 {
        format!("{} ms", us.div_ceil(100) as f64 / 10.0)
    } else {
        format!("{:.2} s", us as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{RequestId, RequestObjectives};

    use super::*;

    fn said(class: &SloClass, objectives: RequestObjectives, predicted_ttft_us: Option<u64>) -> RefusalText {
        let rejection = Rejection {
            request: RequestId(1),
            reason: RejectReason::Unreachable,
            retry_after_us: 0,
            predicted_ttft_us,
            wasted_tokens: 0,
        };
        text_of(&rejection, class, objectives)
    }

    fn text_of(rejection: &Rejection, class: &SloClass, objectives: RequestObjectives) -> RefusalText {
        let (least_tbt_us, idle_step_us) = (40_500, Some(20_000));
        let request = RefusedRequest {
            prompt_tokens: 9,
            answer_tokens: 0,
            asked_tokens: None,
            objectives,
            class,
            least_tbt_us,
            idle_step_us,
        };
        refusal_text(rejection, &request)
    }

    #[test]
    fn a_full_conductor_names_its_setting_and_predicts_nothing() {
        let rejection = Rejection {
            request: RequestId(1),
            reason: RejectReason::QueueFull,
            retry_after_us: 1_000_000,
            predicted_ttft_us: None,
            wasted_tokens: 0,
        };
        let text = text_of(&rejection, &SloClass::default(), RequestObjectives::default());
        assert!(text.message.contains("scheduler.max_waiting_requests"), "{}", text.message);
        assert!(text.message.contains("in 1.0 s") && !text.message.contains("predict"), "{}", text.message);
    }

    #[test]
    fn an_unreachable_objective_is_named_beside_what_is_predicted() {
        let class = SloClass { name: "fast".into(), ttft_us: 500_000, tbt_us: 50_000, ..SloClass::default() };
        let text = said(&class, RequestObjectives::default(), Some(1_250_000));
        assert_eq!((text.status, text.param), (400, None));
        for part in ["within 500 ms and", "40.5 ms between tokens", "1.25 s and 20 ms are predicted"] {
            assert!(text.message.contains(part), "{part}: {}", text.message);
        }
        let own = RequestObjectives { ttft_us: Some(7_000), tbt_us: None };
        let text = said(&SloClass { headroom_permille: 125, ..class }, own, Some(9_123));
        assert_eq!(text.param, Some("x-slo-ttft-ms"));
        for part in ["within 7 ms, less 12.5 % kept free", "9.2 ms and 20 ms are predicted"] {
            assert!(text.message.contains(part), "{part}: {}", text.message);
        }
    }

    #[test]
    fn a_tbt_that_is_too_short_is_answered_with_the_least_that_can_be_asked_for() {
        let class = SloClass { name: "fast".into(), ..SloClass::default() };
        let own = RequestObjectives { ttft_us: Some(7_000), tbt_us: Some(40_000) };
        let text = said(&class, own, None);
        assert_eq!((text.status, text.param), (400, Some("x-slo-tbt-ms")));
        assert!(text.message.contains("asks for 40 ms"), "{}", text.message);
        assert!(
            text.message.contains("class \"fast\" may take 40.5 ms: ask for 41 ms or more"),
            "{}",
            text.message
        );
    }
}
