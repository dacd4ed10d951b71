//! A server with the completion API's shapes and no model: it answers at once with as many tokens as asked for. Its
//! only cost is HTTP and finding three fields in the body.

use std::convert::Infallible;

use baton_http::{Incoming, reply, whole};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use serde::Deserialize;
use tokio::net::TcpListener;

use super::serve::{AnyBody, in_one_piece, serve};

/// Longest body that is taken, bytes.
const MAX_REQUEST_BYTES: usize = 64 << 20;
/// Most tokens in an answer.
const MAX_TOKENS: u32 = 1 << 20;

/// The fields of a request that it needs.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RequestFields {
    stream: bool,
    max_tokens: Option<u32>,
}

/// Serves completions for as long as it is polled.
pub async fn run(listener: TcpListener) {
    serve("bench: upstream", listener, answer).await;
}

async fn answer(request: Request<Incoming>) -> Response<AnyBody> {
    let chat = match (request.method(), request.uri().path()) {
        (&Method::GET, "/v1/models") => {
            return json(StatusCode::OK, r#"{"object":"list","data":[{"id":"none","object":"model"}]}"#);
        }
        (&Method::POST, "/v1/chat/completions") => true,
        (&Method::POST, "/v1/completions") => false,
        _ => return error(StatusCode::NOT_FOUND, "no such path"),
    };
    let Ok(body) = whole(request.into_body(), MAX_REQUEST_BYTES).await else {
        return error(StatusCode::PAYLOAD_TOO_LARGE, "the body is too long or broke off");
    };
    let Ok(wanted) = serde_json::from_slice::<RequestFields>(&body) else {
        return error(StatusCode::BAD_REQUEST, "the body is not a JSON object");
    };
    let tokens = wanted.max_tokens.unwrap_or(1).clamp(1, MAX_TOKENS);
    if wanted.stream { streamed(chat, tokens) } else { at_once(chat, tokens) }
}

fn json(status: StatusCode, text: impl Into<Bytes>) -> Response<AnyBody> {
    reply(status, "application/json", in_one_piece(text))
}

fn error(status: StatusCode, message: &str) -> Response<AnyBody> {
    let text =
        serde_json::json!({"error": {"message": message, "type": "invalid_request_error", "code": null}});
    json(status, text.to_string())
}

fn usage(tokens: u32) -> String {
    format!(
        r#""usage":{{"prompt_tokens":1,"completion_tokens":{tokens},"total_tokens":{}}}"#,
        u64::from(tokens) + 1
    )
}

fn at_once(chat: bool, tokens: u32) -> Response<AnyBody> {
    let text = "a".repeat(tokens as usize);
    let choice = if chat {
        format!(r#""message":{{"role":"assistant","content":"{text}"}}"#)
    } else {
        format!(r#""text":"{text}""#)
    };
    let kind = if chat { "chat.completion" } else { "text_completion" };
    json(
        StatusCode::OK,
        format!(
            r#"{{"id":"0","object":"{kind}","created":0,"model":"none","choices":[{{"index":0,{choice},"finish_reason":"length"}}],{}}}"#,
            usage(tokens)
        ),
    )
}

/// One event a token, each in a write of its own as an engine would send it.
fn streamed(chat: bool, tokens: u32) -> Response<AnyBody> {
    let piece = if chat { r#""delta":{"content":"a"}"# } else { r#""text":"a""# };
    let kind = if chat { "chat.completion.chunk" } else { "text_completion" };
    let event = |finish: &str| {
        Bytes::from(format!(
            "data: {{\"id\":\"0\",\"object\":\"{kind}\",\"created\":0,\"model\":\"none\",\"choices\":[{{\"index\":0,{piece},\"finish_reason\":{finish}}}]}}\n\n"
        ))
    };
    let (middle, last) = (event("null"), event("\"length\""));
    let end = Bytes::from(format!("data: {{\"choices\":[],{}}}\n\ndata: [DONE]\n\n", usage(tokens)));
    let frames = (0..=tokens).map(move |at| match tokens - at {
        0 => end.clone(),
        1 => last.clone(),
        _ => middle.clone(),
    });
    let paced = futures_util::StreamExt::then(futures_util::stream::iter(frames), |bytes| async move {
        // Without this, many events would leave in one write.
        tokio::task::yield_now().await;
        Ok::<_, Infallible>(Frame::data(bytes))
    });
    let body = StreamBody::new(paced).map_err(|never| match never {}).boxed();
    reply(StatusCode::OK, "text/event-stream", body)
}
