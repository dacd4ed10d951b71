//! From a story to spans: one for the request, one for each stage of each attempt below it.

use std::time::SystemTime;

use baton_types::Rng;
use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::story::{HANDOFF, QUEUE, Stage, Story};

/// The properties that distinguish one span of a story.
struct Part {
    id: u64,
    parent: Option<u64>,
    kind: SpanKind,
    name: &'static str,
    time: (SystemTime, SystemTime),
}

/// All spans of an ended request, the root first.
pub(super) fn spans(story: &Story) -> Vec<SpanData> {
    let mut spans = Vec::with_capacity(story.span_count());
    spans.push(root(story));
    let mut ids = Rng::new(story.span_id);
    spans.extend(story.stages.iter().map(|stage| child(story, stage, ids.next_u64().max(1))));
    spans
}

fn root(story: &Story) -> SpanData {
    let part = Part {
        id: story.span_id,
        parent: story.parent,
        kind: SpanKind::Server,
        name: "request",
        time: (story.wall(story.arrived_us), story.wall(story.ended_us)),
    };
    let mut span = bare(story, part);
    span.parent_span_is_remote = story.parent.is_some();
    span.attributes = about(story);
    let first = story.first_token_us.map(|at_us| Event::new("first_token", story.wall(at_us), Vec::new(), 0));
    let retries = story.retries.iter().map(|(attempt, at_us)| {
        let attributes = vec![KeyValue::new("baton.attempt", i64::from(*attempt))];
        Event::new("retry", story.wall(*at_us), attributes, 0)
    });
    span.events.events.extend(first.into_iter().chain(retries));
    span.events.events.sort_by_key(|event| event.timestamp);
    // Refusals and clients that leave are no errors of the service.
    let reason = story.reason.unwrap_or("failed");
    if story.summary.outcome == "failed"
        || (story.summary.outcome == "cancelled" && reason.ends_with("_timeout"))
    {
        span.status = Status::error(reason);
    }
    span
}

fn about(story: &Story) -> Vec<KeyValue> {
    let summary = &story.summary;
    let mut attributes = vec![
        KeyValue::new("baton.request_id", Value::from(summary.request_id.to_string())),
        KeyValue::new("baton.class", summary.class.clone()),
        KeyValue::new("baton.outcome", summary.outcome),
        KeyValue::new("baton.prompt_tokens", number(summary.prompt_tokens)),
        KeyValue::new("baton.cached_tokens", number(summary.cached_tokens)),
        KeyValue::new("baton.output_tokens", number(summary.output_tokens)),
        KeyValue::new("baton.moves", i64::from(summary.moves)),
        KeyValue::new("baton.attempts", i64::from(story.attempts)),
    ];
    if let Some(tenant) = &summary.tenant {
        attributes.push(KeyValue::new("baton.tenant", tenant.to_string()));
    }
    if let Some(reason) = story.reason.filter(|_| summary.outcome != "completed") {
        attributes.push(KeyValue::new("baton.reason", reason));
    }
    if story.untold_stages > 0 {
        attributes.push(KeyValue::new("baton.untold_stages", i64::from(story.untold_stages)));
    }
    let last = story.stages.iter().rev().map(|stage| &stage.place).find(|place| place.prefill.is_some());
    let legs = last.map(|place| [("baton.prefill", &place.prefill), ("baton.decode", &place.decode)]);
    for (key, name) in legs.into_iter().flatten() {
        attributes.extend(name.as_ref().map(|name| KeyValue::new(key, name.to_string())));
    }
    attributes
}

fn child(story: &Story, stage: &Stage, id: u64) -> SpanData {
    let part = Part {
        id,
        parent: Some(story.span_id),
        kind: SpanKind::Internal,
        name: stage.place.stage,
        time: (story.wall(stage.start_us), story.wall(stage.end_us)),
    };
    let mut span = bare(story, part);
    span.attributes.push(KeyValue::new("baton.attempt", i64::from(stage.place.attempt)));
    let (prefill, decode) = (&stage.place.prefill, &stage.place.decode);
    let named = match stage.place.stage {
        QUEUE => [None, None],
        HANDOFF => [Some(("baton.from", prefill)), Some(("baton.to", decode))],
        "decode" => [Some(("baton.instance", decode)), None],
        _ => [Some(("baton.instance", prefill)), None],
    };
    for (key, name) in named.into_iter().flatten() {
        span.attributes.extend(name.as_ref().map(|name| KeyValue::new(key, name.to_string())));
    }
    if let Some((failure, at_us)) = stage.failure {
        let attributes =
            vec![KeyValue::new("baton.stage", stage.place.stage), KeyValue::new("baton.failure", failure)];
        span.events.events.push(Event::new("failure", story.wall(at_us), attributes, 0));
        if stage.broken {
            span.status = Status::error(failure);
        }
    }
    span
}

fn bare(story: &Story, part: Part) -> SpanData {
    let context = SpanContext::new(
        TraceId::from(story.trace_id),
        SpanId::from(part.id),
        TraceFlags::SAMPLED,
        false,
        TraceState::default(),
    );
    SpanData {
        span_context: context,
        parent_span_id: part.parent.map_or(SpanId::INVALID, SpanId::from),
        parent_span_is_remote: false,
        span_kind: part.kind,
        name: part.name.into(),
        start_time: part.time.0,
        end_time: part.time.1,
        attributes: Vec::new(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: InstrumentationScope::builder("baton")
            .with_version(env!("CARGO_PKG_VERSION"))
            .build(),
    }
}

fn number(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
