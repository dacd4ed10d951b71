//! The environment variables of OpenTelemetry that Baton takes: what spans say about this process, and headers for the
//! collector. Its address is a setting alone.

use std::env::VarError;

use http::{HeaderName, HeaderValue};
use opentelemetry::KeyValue;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::TelemetryResourceDetector;
use percent_encoding::percent_decode_str;

const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";
/// The exporter reads the first of them that is set.
const HEADERS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"];

const FORM: &str =
    "write KEY=VALUE,KEY=VALUE, and in keys and values %2C for a comma, %3D for = and %25 for %";

/// Why a variable of the environment cannot be used, and what to write. No value is repeated: it may be a key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// It is no text.
    #[error("{0}: not UTF-8; write it in UTF-8")]
    NotUtf8(&'static str),
    /// An entry is at fault.
    #[error("{variable}: entry {entry} {fault}; {FORM}")]
    Entry {
        /// The variable.
        variable: &'static str,
        /// Which entry, from 1.
        entry: usize,
        /// The fault.
        fault: &'static str,
    },
    /// A header has a name that none can have.
    #[error("{variable}: {name:?} is no name of a header; {FORM}")]
    HeaderName {
        /// The variable.
        variable: &'static str,
        /// The name.
        name: String,
    },
    /// A header has a value that none can have.
    #[error("{variable}: the value of {name} cannot be that of a header; {FORM}")]
    HeaderValue {
        /// The variable.
        variable: &'static str,
        /// The header's name.
        name: String,
    },
}

/// Reads a variable, as [`std::env::var`].
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Result<String, VarError>;

/// The attributes of this process: Baton's own, and over them the environment's. The library's detector is not
/// used for those, because it passes over entries that it cannot read, and decodes none.
///
/// # Errors
/// Names the variable, the entry, and what to write.
pub(super) fn resource(read: Lookup<'_>, instance: &str) -> Result<Resource, EnvironmentError> {
    let own = [
        KeyValue::new("service.name", "baton"),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", instance.to_owned()),
    ];
    let given = pairs(read, ATTRIBUTES)?.into_iter().map(|(key, value)| KeyValue::new(key, value));
    let named = value(read, SERVICE_NAME)?.map(|name| KeyValue::new("service.name", name));
    let builder = Resource::builder_empty().with_detector(Box::new(TelemetryResourceDetector));
    Ok(builder.with_attributes(own.into_iter().chain(given).chain(named)).build())
}

/// Checks the headers that the exporter reads by itself: it passes over wrong ones.
///
/// # Errors
/// As [`resource`].
pub(super) fn check_headers(read: Lookup<'_>) -> Result<(), EnvironmentError> {
    for variable in HEADERS {
        for (name, value) in pairs(read, variable)? {
            if HeaderName::from_bytes(name.as_bytes()).is_err() {
                return Err(EnvironmentError::HeaderName { variable, name });
            }
            if value.is_empty() || HeaderValue::from_str(&value).is_err() {
                return Err(EnvironmentError::HeaderValue { variable, name });
            }
        }
    }
    Ok(())
}

/// The value of a variable; none when it is empty.
fn value(read: Lookup<'_>, variable: &'static str) -> Result<Option<String>, EnvironmentError> {
    match read(variable) {
        Ok(text) => Ok(Some(text).filter(|text| !text.is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(EnvironmentError::NotUtf8(variable)),
    }
}

/// The entries of a variable, decoded.
fn pairs(read: Lookup<'_>, variable: &'static str) -> Result<Vec<(String, String)>, EnvironmentError> {
    let Some(text) = value(read, variable)? else { return Ok(Vec::new()) };
    let entries = text.split(',').enumerate();
    entries
        .map(|(at, entry)| {
            let wrong = |fault| EnvironmentError::Entry { variable, entry: at + 1, fault };
            let (key, value) = entry.split_once('=').ok_or_else(|| wrong("has no ="))?;
            let decoded = |text: &str| {
                decode(text.trim()).ok_or_else(|| wrong("has a % without two hexadecimal digits of UTF-8"))
            };
            let (key, value) = (decoded(key)?, decoded(value)?);
            if key.is_empty() { Err(wrong("has no key")) } else { Ok((key, value)) }
        })
        .collect()
}

/// `text` with `%XX` read back; none when that is not possible.
fn decode(text: &str) -> Option<String> {
    let is_hex =
        |rest: &str| rest.as_bytes().get(..2).is_some_and(|two| two.iter().all(u8::is_ascii_hexdigit));
    let whole = text.split('%').skip(1).all(is_hex);
    whole.then(|| percent_decode_str(text).decode_utf8().ok())?.map(Into::into)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use opentelemetry::Key;

    use super::*;

    fn of<'a>(variables: &'a [(&str, &str)]) -> impl Fn(&str) -> Result<String, VarError> + 'a {
        |name| {
            let set = variables.iter().find(|(variable, _)| *variable == name);
            set.map(|(_, value)| (*value).to_owned()).ok_or(VarError::NotPresent)
        }
    }

    fn attribute(resource: &Resource, key: &'static str) -> Option<String> {
        resource.get(&Key::from_static_str(key)).map(|value| value.to_string())
    }

    #[test]
    fn the_environment_goes_over_our_own_attributes() {
        let alone = resource(&of(&[(ATTRIBUTES, "")]), "h-9090").unwrap();
        let version = env!("CARGO_PKG_VERSION");
        for (key, value) in [
            ("service.name", "baton"),
            ("service.version", version),
            ("service.instance.id", "h-9090"),
            ("telemetry.sdk.name", "opentelemetry"),
        ] {
            assert_eq!(attribute(&alone, key).as_deref(), Some(value));
        }
        let attributes =
            "service.name=chat, deployment.environment.name = prod%2Ceu,team=%C3%A9quipe,empty=,b64=YQ==";
        let given = resource(&of(&[(ATTRIBUTES, attributes)]), "h-9090").unwrap();
        for (key, value) in [
            ("service.name", "chat"),
            ("service.version", version),
            ("deployment.environment.name", "prod,eu"),
            ("team", "équipe"),
            ("empty", ""),
            ("b64", "YQ=="),
        ] {
            assert_eq!(attribute(&given, key).as_deref(), Some(value));
        }
        let named = resource(&of(&[(ATTRIBUTES, attributes), (SERVICE_NAME, "front door")]), "").unwrap();
        assert_eq!(attribute(&named, "service.name").as_deref(), Some("front door"), "it goes over both");
    }

    #[test]
    fn a_wrong_entry_is_named_and_not_repeated() {
        for (text, why) in [
            ("team", "entry 1 has no ="),
            ("a=b,,c=d", "entry 2 has no ="),
            ("a=b,", "entry 2 has no ="),
            ("a=b,=hush", "entry 2 has no key"),
            ("a=hush%2", "entry 1 has a % without"),
            ("a=hush%zz", "entry 1 has a % without"),
            ("a=hush%é", "entry 1 has a % without"),
            ("a=hush%FF", "entry 1 has a % without"),
        ] {
            for variable in [ATTRIBUTES, HEADERS[0], HEADERS[1]] {
                let variables = [(variable, text)];
                let read = of(&variables);
                let error = resource(&read, "").and(check_headers(&read)).unwrap_err().to_string();
                assert!(error.starts_with(&format!("{variable}: {why}")) && error.ends_with(FORM), "{error}");
                assert!(!error.contains("hush"), "{error}");
            }
        }
        let bytes = |_: &str| Err(VarError::NotUnicode(std::ffi::OsString::from_vec(vec![0xff])));
        let error = resource(&bytes, "").unwrap_err().to_string();
        assert!(error.contains(ATTRIBUTES) && error.contains("UTF-8"), "{error}");
    }

    #[test]
    fn headers_are_those_that_http_has() {
        check_headers(&of(&[(HEADERS[1], "x-scope-orgid=acme,authorization=Bearer%20hush")])).unwrap();
        for text in ["a b=hush", "x-key=", "x-key=hu%0Ash"] {
            let error = check_headers(&of(&[(HEADERS[0], text)])).unwrap_err().to_string();
            assert!(error.starts_with(HEADERS[0]) && !error.contains("hu"), "{error}");
        }
    }
}
