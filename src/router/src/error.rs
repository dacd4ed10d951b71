//! The one writer of errors: whatever goes wrong, the client reads OpenAI's error object.

use std::borrow::Cow;

use baton_http::PoolRefusal;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};

use crate::backend::{Fault, Refusal};
use crate::body::{Body, Reply};
use crate::json;

/// Bytes of a message that are sent at most: it may repeat what the client sent.
const MESSAGE_BYTES: usize = 8 << 10;

/// The error of a rejected or failed call: its status, OpenAI's error object, and the headers that say whether and when
/// to retry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// `error.message`: for a person; names what is wrong and what to do.
    pub message: Cow<'static, str>,
    /// `error.param`: the field or header at fault.
    pub param: Option<&'static str>,
    /// `error.code`: for a program.
    pub code: Option<Cow<'static, str>>,
    /// Time until a retry would succeed, µs.
    pub retry_after_us: Option<u64>,
    /// Best time to the first token that was predicted, µs.
    pub predicted_ttft_us: Option<u64>,
    /// Methods that the path does answer, for 405.
    pub allow: Option<&'static str>,
}

impl ApiError {
    /// An error with neither field nor code.
    pub fn new(status: u16, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: None,
            retry_after_us: None,
            predicted_ttft_us: None,
            allow: None,
        }
    }

    /// The client's own mistake, in `param`.
    pub fn invalid(param: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        let mut error = Self::new(400, message);
        error.param = Some(param);
        error
    }

    /// The error with `error.code` set.
    #[must_use]
    pub fn code(mut self, code: impl Into<Cow<'static, str>>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// The error with a delay after which to retry.
    #[must_use]
    pub fn retry_after_us(mut self, wait_us: u64) -> Self {
        self.retry_after_us = Some(wait_us);
        self
    }

    /// `error.type`, as OpenAI names the statuses.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self.status {
            403 => "permission_error",
            429 => "rate_limit_error",
            501 => "not_implemented_error",
            503 => "service_unavailable_error",
            504 => "timeout_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// Whether the same call can do better later, which SDKs read from `x-should-retry`.
    #[must_use]
    pub fn should_retry(&self) -> bool {
        matches!(self.status, 408 | 429 | 502 | 503 | 504)
    }

    /// Appends the error object.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"error\":{\"message\":");
        let shown = self.message.floor_char_boundary(MESSAGE_BYTES);
        json::string(out, &self.message[..shown]);
        out.extend_from_slice(b",\"type\":");
        json::string(out, self.kind());
        for (name, value) in [("param", self.param), ("code", self.code.as_deref())] {
            out.extend_from_slice(b",\"");
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b"\":");
            match value {
                Some(text) => json::string(out, text),
                None => out.extend_from_slice(b"null"),
            }
        }
        out.extend_from_slice(b"}}");
    }

    /// The whole response.
    #[must_use]
    pub fn reply(&self) -> Reply {
        let mut body = Vec::with_capacity(160 + self.message.len().min(MESSAGE_BYTES));
        self.write(&mut body);
        let mut reply = Response::new(Body::full(body));
        *reply.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = reply.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.status >= 400 {
            let retry = if self.should_retry() { "true" } else { "false" };
            headers.insert(HeaderName::from_static("x-should-retry"), HeaderValue::from_static(retry));
        }
        if let Some(wait_us) = self.retry_after_us {
            // Rounded up: a client that retries after this delay must not be rejected as too early.
            headers.insert(header::RETRY_AFTER, wait_us.div_ceil(1_000_000).max(1).into());
            headers.insert(HeaderName::from_static("retry-after-ms"), wait_us.div_ceil(1_000).max(1).into());
        }
        if let Some(ttft_us) = self.predicted_ttft_us {
            headers.insert(HeaderName::from_static("x-baton-predicted-ttft-ms"), (ttft_us / 1_000).into());
        }
        if let Some(allow) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        if self.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(code) = self.code.as_deref().and_then(|code| HeaderValue::from_str(code).ok()) {
            headers.insert(HeaderName::from_static("x-baton-reason"), code);
        }
        reply
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        // A refusal that may be retried says when, even if nobody could predict it.
        let retry = matches!(refusal.status, 429 | 503);
        Self {
            retry_after_us: refusal.retry_after_us.or(retry.then_some(1_000_000)),
            predicted_ttft_us: refusal.predicted_ttft_us,
            param: refusal.param,
            ..Self::new(refusal.status, refusal.message.to_string()).code(refusal.reason.to_string())
        }
    }
}

/// The retry delay where there is no room for a request, µs: the router reads and releases most bodies within a second.
const NO_ROOM_RETRY_US: u64 = 1_000_000;

impl From<PoolRefusal> for ApiError {
    fn from(_: PoolRefusal) -> Self {
        let message = "the requests under way take all the room that there is for them (service.max_held_bytes); try again shortly";
        Self::new(503, message).code("bodies_full").retry_after_us(NO_ROOM_RETRY_US)
    }
}

/// The words of vLLM and SGLang for a prompt or an answer that is too long for the model.
const OVERFLOWS: [&str; 2] = ["maximum context length", "the model's context length"];

impl From<Fault> for ApiError {
    fn from(fault: Fault) -> Self {
        let code = match fault.status {
            400..=499 if OVERFLOWS.iter().any(|words| fault.message.contains(words)) => {
                "context_length_exceeded".to_owned()
            }
            _ => fault.stage.to_string(),
        };
        let error = Self::new(fault.status, fault.message.to_string()).code(code);
        if fault.status == 503 { error.retry_after_us(1_000_000) } else { error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(retry_after_us: Option<u64>) -> ApiError {
        ApiError::from(Refusal {
            status: 429,
            reason: "ttft".into(),
            message: "busy \"now\"".into(),
            param: None,
            retry_after_us,
            predicted_ttft_us: Some(2_500_000),
        })
    }

    #[test]
    fn a_refusal_says_when_to_come_again() {
        let reply = refusal(Some(1_200_001)).reply();
        assert_eq!(reply.status(), 429);
        assert_eq!(reply.headers()["retry-after"], "2");
        assert_eq!(reply.headers()["retry-after-ms"], "1201");
        assert_eq!(reply.headers()["x-should-retry"], "true");
        assert_eq!(reply.headers()["x-baton-predicted-ttft-ms"], "2500");
        assert_eq!(refusal(Some(3)).reply().headers()["retry-after"], "1", "at least a second");
        assert_eq!(refusal(None).reply().headers()["retry-after"], "1");
    }

    #[test]
    fn the_object_is_openais() {
        let mut out = Vec::new();
        refusal(None).write(&mut out);
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let expected = serde_json::json!({"error": {
            "message": "busy \"now\"", "type": "rate_limit_error", "param": null, "code": "ttft"}});
        assert_eq!(value, expected);
    }

    #[test]
    fn mistakes_are_not_worth_a_retry_and_faults_are() {
        let reply = ApiError::invalid("n", "too many").reply();
        assert_eq!(
            (reply.status().as_u16(), &reply.headers()["x-should-retry"]),
            (400, &"false".parse().unwrap())
        );
        assert!(!reply.headers().contains_key("retry-after"));
        let fault = Fault { status: 502, stage: "decode_lost".into(), message: "gone".into() };
        assert!(ApiError::from(fault).should_retry());
        assert!(!ApiError::new(501, "none").should_retry());
    }
}
