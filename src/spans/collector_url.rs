//! The address of an OTLP collector, which also says how the collector is spoken to.

use std::fmt;

use http::Uri;

const FORMS: &str =
    "give http://HOST:4317 for gRPC, or http://HOST:4318/v1/traces for HTTP (https:// with TLS)";

/// Where spans go, and how.
///
/// The path decides: OTLP over HTTP posts to a path, and gRPC has no path to give. A port would not decide, because collectors
/// are free to listen on others. A setting of its own could contradict the URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CollectorUrl(Uri);

/// The defect of a collector's address, and what to give.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("service.otlp_endpoint = \"{text}\": {why}")]
pub struct CollectorUrlError {
    text: String,
    why: String,
}

impl CollectorUrl {
    /// Reads `service.otlp_endpoint`.
    ///
    /// # Errors
    /// It is none; what to give.
    pub(crate) fn parse(text: &str) -> Result<Self, CollectorUrlError> {
        let wrong = |why: &str| CollectorUrlError { text: text.to_owned(), why: why.to_owned() };
        let uri: Uri = text.parse().map_err(|e| wrong(&format!("{e}; {FORMS}")))?;
        match (uri.scheme_str(), uri.port_u16()) {
            (Some("http"), Some(_)) => Ok(Self(uri)),
            (Some("https"), _) if uri.path() != "/" => Ok(Self(uri)),
            (Some("https"), _) => Err(wrong(
                "gRPC goes without TLS here; give the URL of OTLP over HTTP, like https://HOST/v1/traces",
            )),
            _ => Err(wrong(FORMS)),
        }
    }

    /// Whether it is for OTLP over HTTP, otherwise for gRPC.
    pub(super) fn is_http(&self) -> bool {
        self.0.path() != "/"
    }

    /// Whether TLS is spoken.
    pub(super) fn is_secure(&self) -> bool {
        self.0.scheme_str() == Some("https")
    }

    /// All of it.
    pub(super) const fn uri(&self) -> &Uri {
        &self.0
    }

    /// The protocol by name, for logs.
    pub(super) fn protocol(&self) -> &'static str {
        if self.is_http() { "HTTP" } else { "gRPC" }
    }
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL's own text has a path where nobody gave one.
        f.write_str(self.0.to_string().trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_asks_for_http() {
        for (text, protocol) in [
            ("http://127.0.0.1:4317", "gRPC"),
            ("http://collector:4318/", "gRPC"),
            ("http://[::1]:4317", "gRPC"),
            ("http://collector:4318/v1/traces", "HTTP"),
            ("http://collector:4317/otlp/v1/traces", "HTTP"),
            ("https://collector/v1/traces", "HTTP"),
            ("https://collector:8443/otlp/v1/traces", "HTTP"),
        ] {
            let url = CollectorUrl::parse(text).unwrap();
            assert_eq!((url.protocol(), url.to_string().as_str()), (protocol, text.trim_end_matches('/')));
        }
    }

    #[test]
    fn what_is_no_collector_is_refused_with_the_forms_there_are() {
        let wrong = ["127.0.0.1:4317", "http://collector", "http://c/v1/traces", "grpc://c:4317", "a b"];
        for text in wrong {
            let error = CollectorUrl::parse(text).unwrap_err().to_string();
            let named = error.starts_with(&format!("service.otlp_endpoint = \"{text}\": "));
            assert!(named && error.ends_with(FORMS), "{error}");
        }
        for text in ["https://c:4317", "https://c/"] {
            let error = CollectorUrl::parse(text).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("https://HOST/v1/traces"), "{error}");
        }
    }
}
