//! The caller, and what the headers say of the call.

use std::hint::black_box;
use std::sync::Arc;

use baton_types::{MAX_OWN_OBJECTIVE_US, RequestObjectives};
use http::{HeaderMap, header};

use crate::class_rules::{self, RuleTable, RuledCall};
use crate::config::{ApiKey, RouterConfig};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::tokenize::session_number;
use crate::trace::TraceParent;

/// Names from headers are at most this long.
const MAX_NAME_BYTES: usize = 128;
/// Longest time that a client may say it waits: a day.
const MAX_TIMEOUT_US: u64 = 86_400_000_000;
/// Headers that name the service class: the usual one, and the same under an older name.
const CLASS_HEADERS: [&str; 2] = ["x-slo-class", "x-baton-class"];
/// Headers that name the TTFT and the TBT of one call, ms.
pub const OBJECTIVE_HEADERS: [&str; 2] = ["x-slo-ttft-ms", "x-slo-tbt-ms"];
/// The API's own words for leaving the tier open.
const OPEN_TIERS: [&str; 2] = ["auto", "default"];
/// The API's own service tiers, which clients send without knowing the classes here.
pub const API_TIERS: [&str; 3] = ["flex", "priority", "scale"];

/// The properties of a call that its headers set.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) tenant: Option<Arc<str>>,
    pub(crate) class: Option<Arc<str>>,
    /// The header or field that names the class.
    pub(crate) class_param: Option<&'static str>,
    pub(crate) objectives: RequestObjectives,
    pub(crate) session: Option<u64>,
    pub(crate) timeout_us: Option<u64>,
    pub(crate) explain: bool,
    pub(crate) trace: Option<TraceParent>,
}

impl Caller {
    /// Reads the headers, and from the body what they leave open. `served_model` is what a client gets that names none.
    pub(crate) fn read(
        headers: &HeaderMap,
        fields: &Fields<'_>,
        config: &RouterConfig,
        served_model: &str,
    ) -> Result<Self, ApiError> {
        let keys = config.api_keys.now();
        let AdmittedCaller { tenant, classes, class } = admit(headers, &keys)?;
        let tier = fields.service_tier.as_ref().map(|tier| tier.0.as_ref());
        let call = RuledCall {
            tenant: tenant.as_deref(),
            model: fields.model.as_ref().map_or(served_model, |model| model.0.as_ref()),
            priority: class_rules::priority(fields.priority)?,
        };
        let rules = config.class_rules.now();
        rules.check_priority(&call)?;
        let (class, class_param) = match class {
            Some(named) => (Some(named.class), Some(named.param)),
            None => class_of(tier, classes, (&rules, &call))?,
        };
        let objectives = objectives(headers)?;
        let session = session(headers, fields, config)
            .map(|session| session_number(tenant.as_deref(), session, *config.hash_seed.expose()));
        let streams = fields.stream.unwrap_or(false);
        let timeout_us = timeout_us(headers, streams)?;
        let explain = text(headers, "x-baton-explain").is_some_and(|value| matches!(value, "1" | "true"));
        let trace = TraceParent::read(headers);
        Ok(Self { tenant, class, class_param, objectives, session, timeout_us, explain, trace })
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok().filter(|value| !value.is_empty())
}

fn name(headers: &HeaderMap, header: &'static str) -> Result<Option<Arc<str>>, ApiError> {
    match text(headers, header) {
        Some(value) if value.len() > MAX_NAME_BYTES => {
            Err(ApiError::new(400, format!("header {header} is longer than {MAX_NAME_BYTES} bytes")))
        }
        value => Ok(value.map(Into::into)),
    }
}

/// The client's name for the request if it can be one, else a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> Arc<str> {
    let named = text(headers, "x-request-id")
        .filter(|id| id.len() <= MAX_NAME_BYTES && id.bytes().all(|byte| byte.is_ascii_graphic()));
    named.map_or_else(|| fresh_id("req-").into(), Into::into)
}

/// A name that nothing else has.
pub(crate) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}

/// The tenant of a call, and its class as far as the headers determine it.
#[derive(Debug)]
pub(crate) struct AdmittedCaller<'k> {
    pub(crate) tenant: Option<Arc<str>>,
    /// The classes that its key may use; all where there are none.
    classes: &'k [Arc<str>],
    /// The class that the header names.
    class: Option<NamedClass>,
}

/// A class as the client names it.
#[derive(Debug)]
struct NamedClass {
    class: Arc<str>,
    /// The header or field in which it does.
    param: &'static str,
}

/// Admits a call. Where keys are configured, the call needs one of them. A key's own tenant takes precedence over the
/// header. The class in the header must be one that the key may use.
pub(crate) fn admit<'k>(headers: &HeaderMap, keys: &'k [ApiKey]) -> Result<AdmittedCaller<'k>, ApiError> {
    let key = if keys.is_empty() { None } else { Some(shown(headers, keys)?) };
    let tenant = match key.and_then(|key| key.tenant.as_deref()) {
        Some(tenant) => Some(tenant.into()),
        None => name(headers, "x-tenant-id")?,
    };
    let classes = key.map_or(&[][..], |key| &key.classes);
    let class = class_in(headers)?;
    if let Some(named) = &class {
        may_use(&named.class, classes).map_err(|error| ApiError { param: Some(named.param), ..error })?;
    }
    Ok(AdmittedCaller { tenant, classes, class })
}

/// The class that the headers name, under either name.
fn class_in(headers: &HeaderMap) -> Result<Option<NamedClass>, ApiError> {
    let named = |param| name(headers, param).map(|found| found.map(|class| NamedClass { class, param }));
    match CLASS_HEADERS.map(named) {
        [Ok(Some(one)), Ok(Some(other))] if one.class != other.class => {
            let [first, second] = CLASS_HEADERS;
            Err(ApiError::new(
                400,
                format!("headers {first} and {second} name different classes; send one of them"),
            ))
        }
        [one, other] => Ok(one?.or(other?)),
    }
}

/// The key that a call shows.
fn shown<'k>(headers: &HeaderMap, keys: &'k [ApiKey]) -> Result<&'k ApiKey, ApiError> {
    let given = headers.get(header::AUTHORIZATION).map(http::HeaderValue::as_bytes).unwrap_or_default();
    let scheme = given.get(..7).unwrap_or_default();
    if !scheme.eq_ignore_ascii_case(b"bearer ") {
        let message = "no API key; send it in the header Authorization: Bearer <key>";
        return Err(ApiError::new(401, message).code("missing_api_key"));
    }
    known(given[7..].trim_ascii(), keys)
        .ok_or_else(|| ApiError::new(401, "this API key is not known here; check it").code("invalid_api_key"))
}

/// The class of a call without the header, by its `service_tier`, else by the rules, else by its key; and the field that
/// names it.
fn class_of(
    tier: Option<&str>,
    classes: &[Arc<str>],
    (rules, call): (&RuleTable, &RuledCall<'_>),
) -> Result<(Option<Arc<str>>, Option<&'static str>), ApiError> {
    let by_default = || {
        let ruled = rules.class_of(call, |class| may_use(class, classes))?;
        let ruled = ruled.map(|(class, param)| (Some(class), param));
        Ok(ruled.unwrap_or_else(|| (classes.first().cloned(), None)))
    };
    let is_open =
        |tier: &str| OPEN_TIERS.contains(&tier) || (API_TIERS.contains(&tier) && rules.leaves_open(tier));
    let Some(tier) = tier.filter(|tier| !is_open(tier)) else { return by_default() };
    match may_use(tier, classes) {
        Ok(()) => Ok((Some(tier.into()), Some("service_tier"))),
        Err(_) if API_TIERS.contains(&tier) => by_default(),
        Err(error) => Err(ApiError { param: Some("service_tier"), ..error }),
    }
}

/// The objectives that a call names for itself.
fn objectives(headers: &HeaderMap) -> Result<RequestObjectives, ApiError> {
    let [ttft_us, tbt_us] = OBJECTIVE_HEADERS.map(|header| objective_us(headers, header));
    Ok(RequestObjectives { ttft_us: ttft_us?, tbt_us: tbt_us? })
}

/// An objective in whole milliseconds, as µs. It decides what is promised, so an unusable value is refused.
fn objective_us(headers: &HeaderMap, header: &'static str) -> Result<Option<u64>, ApiError> {
    let Some(given) = headers.get(header) else { return Ok(None) };
    let most_ms = MAX_OWN_OBJECTIVE_US / 1_000;
    let digits = given.to_str().ok().map(str::trim).filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
    let ms = digits.and_then(|digits| digits.parse::<u64>().ok()).filter(|ms| (1..=most_ms).contains(ms));
    match ms {
        Some(ms) => Ok(Some(ms * 1_000)),
        None => {
            let message = format!(
                "header {header} is {:?}; it is a whole number of milliseconds from 1 to {most_ms}",
                String::from_utf8_lossy(given.as_bytes())
            );
            Err(ApiError::invalid(header, message))
        }
    }
}

/// Whether a key with these classes may use one.
fn may_use(class: &str, classes: &[Arc<str>]) -> Result<(), ApiError> {
    if classes.is_empty() || classes.iter().any(|allowed| **allowed == *class) {
        return Ok(());
    }
    let message = format!(
        "this API key may not use the service class {class:?}; it may use: {}. Name one of these, or none",
        classes.join(", ")
    );
    Err(ApiError::new(403, message).code("class_not_allowed"))
}

/// The key given, found without telling by the time how much of one was right, or which.
fn known<'k>(given: &[u8], keys: &'k [ApiKey]) -> Option<&'k ApiKey> {
    let mut found = None;
    for key in keys {
        if black_box(same_key(given, key.key.expose().as_bytes())) && found.is_none() {
            found = Some(key);
        }
    }
    found
}

/// Whether `given` is `key`. The time it takes does not depend on where they differ. An empty key matches nothing.
#[must_use]
pub fn same_key(given: &[u8], key: &[u8]) -> bool {
    let mut differs = u8::from(given.len() != key.len() || key.is_empty());
    for (at, &byte) in key.iter().enumerate() {
        differs |= black_box(byte ^ given.get(at).copied().unwrap_or(!byte));
    }
    black_box(differs) == 0
}

fn session<'s>(headers: &'s HeaderMap, fields: &'s Fields<'_>, config: &RouterConfig) -> Option<&'s str> {
    let from_headers = config.session_headers.iter().find_map(|name| text(headers, name));
    let from_body = || {
        let named = [&fields.prompt_cache_key, &fields.user, &fields.previous_response_id];
        named.into_iter().flatten().map(|text| text.0.as_ref()).find(|text| !text.is_empty())
    };
    from_headers.or_else(from_body)
}

/// How long the client waits: for the whole answer, or as SDKs say it, in seconds; and for the next
/// byte, which is the whole answer unless it is streamed. The SDK for JavaScript waits so long for the response's head,
/// whatever it says: once that is there, a stream may take any time. A client that waits no longer leaves.
fn timeout_us(headers: &HeaderMap, streams: bool) -> Result<Option<u64>, ApiError> {
    let own = ("x-request-timeout-ms", 1_000.0);
    let of_sdks = [("x-stainless-timeout", 1_000_000.0), ("x-stainless-read-timeout", 1_000_000.0)];
    if let Some(value) = text(headers, own.0) {
        return match micros(value, own.1) {
            Some(timeout_us) => Ok(Some(timeout_us)),
            None => Err(ApiError::new(400, format!("header {} is {value:?}; it is a number above 0", own.0))),
        };
    }
    // SDKs add these headers by default, so an unusable value is no reason to reject a call.
    let of_head = text(headers, "x-stainless-lang") == Some("js");
    let usable = &of_sdks[..if !streams { 2 } else { usize::from(!of_head) }];
    Ok(usable.iter().find_map(|(name, unit)| micros(text(headers, name)?, *unit)))
}

fn micros(value: &str, unit_us: f64) -> Option<u64> {
    let number: f64 = value.trim().parse().ok()?;
    let micros = number * unit_us;
    (micros.is_finite() && micros >= 1.0).then(|| (micros as u64).min(MAX_TIMEOUT_US))
}

/// Everything beside tokens that must match for two blocks to be the same: each part with its length,
/// so that no two can be read as one another.
pub(crate) fn namespace(revision: &str, tenant: Option<&str>, salt: Option<&str>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(64);
    for (tag, part) in [(b'r', Some(revision)), (b't', tenant), (b's', salt)] {
        if let Some(part) = part {
            bytes.push(tag);
            bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part.as_bytes());
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class_rules::ClassRule;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn read(list: &[(&'static str, &str)], body: &str) -> Caller {
        let fields = crate::fields::read(body.as_bytes()).unwrap();
        Caller::read(&headers(list), &fields, &RouterConfig::default(), "m").unwrap()
    }

    #[test]
    fn keys_let_in_and_name_the_tenant() {
        let keys = [
            ApiKey { key: "one".into(), tenant: Some("acme".into()), classes: Vec::new() },
            ApiKey { key: "two".into(), tenant: None, classes: Vec::new() },
        ];
        let ask =
            |list: &[(&'static str, &str)]| admit(&headers(list), &keys).map(|admitted| admitted.tenant);
        let said = ("x-tenant-id", "other");
        assert_eq!(ask(&[("authorization", "Bearer one"), said]).unwrap().as_deref(), Some("acme"));
        assert_eq!(ask(&[("authorization", "bearer  two "), said]).unwrap().as_deref(), Some("other"));
        for wrong in ["Bearer on", "Bearer onee", "Bearer ", "Basic one", "one", ""] {
            assert_eq!(ask(&[("authorization", wrong), said]).unwrap_err().status, 401, "{wrong}");
        }
        assert!(!same_key(b"", b""), "an empty key lets nobody in");
    }

    #[test]
    fn sessions_come_from_what_clients_send() {
        let by_header = read(&[("x-session-id", "s")], r#"{"user":"u"}"#).session;
        assert!(by_header.is_some());
        assert_eq!(by_header, read(&[("x-session-affinity", "s"), ("x-session-id", "t")], "{}").session);
        let by_key = read(&[], r#"{"user":"u","prompt_cache_key":"k"}"#).session;
        assert_eq!(by_key, read(&[], r#"{"prompt_cache_key":"k"}"#).session);
        assert_ne!(by_key, read(&[], r#"{"user":"u"}"#).session);
        assert_ne!(by_key, read(&[("x-tenant-id", "t")], r#"{"prompt_cache_key":"k"}"#).session);
        assert_eq!(read(&[], "{}").session, None);
    }

    #[test]
    fn time_limit_is_read_in_the_clients_unit() {
        assert_eq!(read(&[("x-request-timeout-ms", "1500")], "{}").timeout_us, Some(1_500_000));
        assert_eq!(read(&[("x-stainless-timeout", "2.5")], "{}").timeout_us, Some(2_500_000));
        assert_eq!(read(&[("x-stainless-read-timeout", "600.0")], "{}").timeout_us, Some(600_000_000));
        assert_eq!(read(&[("x-stainless-read-timeout", "600")], r#"{"stream":true}"#).timeout_us, None);
        assert_eq!(read(&[("x-stainless-timeout", "never")], "{}").timeout_us, None);
        let of_js = [("x-stainless-lang", "js"), ("x-stainless-timeout", "5")];
        assert_eq!(read(&of_js, "{}").timeout_us, Some(5_000_000));
        assert_eq!(read(&of_js, r#"{"stream":true}"#).timeout_us, None);
        let of_go = [("x-stainless-lang", "go"), ("x-stainless-timeout", "5")];
        assert_eq!(read(&of_go, r#"{"stream":true}"#).timeout_us, Some(5_000_000));
        let fields = Fields::default();
        let bad = headers(&[("x-request-timeout-ms", "-1")]);
        assert_eq!(Caller::read(&bad, &fields, &RouterConfig::default(), "m").unwrap_err().status, 400);
    }

    #[test]
    fn classes_come_from_header_or_tier() {
        assert_eq!(
            read(&[("x-baton-class", "fast")], r#"{"service_tier":"flex"}"#).class.as_deref(),
            Some("fast")
        );
        let named = |list: HeaderMap| admit(&list, &[]).unwrap().class.map(|named| named.class);
        let both = |one, other| headers(&[("x-slo-class", one), ("x-baton-class", other)]);
        assert_eq!(read(&[("x-slo-class", "fast")], "{}").class.as_deref(), Some("fast"));
        assert_eq!(named(both("fast", "fast")).as_deref(), Some("fast"));
        assert_eq!(named(both("fast", "")).as_deref(), Some("fast"));
        let error = admit(&both("fast", "slow"), &[]).unwrap_err();
        assert!(error.status == 400 && error.message.contains("x-slo-class and x-baton-class"), "{error:?}");
        assert_eq!(read(&[], r#"{"service_tier":"flex"}"#).class.as_deref(), Some("flex"));
        assert_eq!(read(&[], r#"{"service_tier":"auto"}"#).class, None);
    }

    #[test]
    fn a_call_that_names_no_class_has_the_one_of_a_rule() {
        let config = RouterConfig {
            api_keys: vec![ApiKey {
                key: "k".into(),
                tenant: Some("acme".into()),
                classes: vec!["slow".into(), "fast".into()],
            }]
            .into(),
            ..RouterConfig::default()
        };
        let rule = |tenant: Option<&str>, model: Option<&str>, priority, class: &str| ClassRule {
            tenant: tenant.map(str::to_owned),
            model: model.map(str::to_owned),
            priority,
            class: class.into(),
        };
        let names = ["slow", "fast", "dear"].map(Arc::from);
        config.class_rules.set(
            vec![
                rule(None, None, Some(5), "fast"),
                rule(None, None, Some(6), "dear"),
                rule(Some("acme"), Some("small"), None, "dear"),
                rule(None, Some("small"), None, "fast"),
            ],
            names.to_vec(),
        );
        let ask = |list: &[(&'static str, &str)], body: &str| {
            let list = headers(&[&[("authorization", "Bearer k")], list].concat());
            let fields = crate::fields::read(body.as_bytes()).unwrap();
            let read = Caller::read(&list, &fields, &config, "large");
            read.map(|caller| (caller.class.unwrap().to_string(), caller.class_param))
        };
        let slow = [("x-slo-class", "slow")];
        for (list, body, class, param) in [
            (&[][..], "{}", "slow", None),
            (&[], r#"{"priority":5}"#, "fast", Some("priority")),
            (&[], r#"{"model":"small"}"#, "fast", None),
            (&[], r#"{"model":"small","service_tier":"flex"}"#, "fast", None),
            (&[], r#"{"model":"small","service_tier":"slow"}"#, "slow", Some("service_tier")),
            (&slow, r#"{"priority":5}"#, "slow", Some("x-slo-class")),
            (&slow, r#"{"priority":6}"#, "slow", Some("x-slo-class")),
        ] {
            assert_eq!(ask(list, body).unwrap(), (class.to_owned(), param), "{list:?} {body}");
        }
        let refused = ask(&[], r#"{"priority":6}"#).unwrap_err();
        assert_eq!((refused.status, refused.param), (403, Some("priority")));
        let unknown = ask(&slow, r#"{"priority":7}"#).unwrap_err();
        assert_eq!((unknown.status, unknown.param), (400, Some("priority")));
        assert!(unknown.message.ends_with("there are classes for: 5, 6"), "{}", unknown.message);
        config.class_rules.set(Vec::new(), Vec::new());
        assert_eq!(ask(&[], r#"{"model":"small"}"#).unwrap().0, "slow", "a later list holds at once");
    }

    #[test]
    fn an_error_about_a_class_names_where_it_was_named() {
        let param = |list: &[(&'static str, &str)], body| read(list, body).class_param;
        assert_eq!(param(&[("x-slo-class", "fast")], "{}"), Some("x-slo-class"));
        assert_eq!(param(&[("x-baton-class", "fast")], r#"{"service_tier":"flex"}"#), Some("x-baton-class"));
        assert_eq!(param(&[], r#"{"service_tier":"flex"}"#), Some("service_tier"));
        assert_eq!(param(&[], r#"{"service_tier":"auto"}"#), None);
    }

    #[test]
    fn objectives_are_whole_milliseconds_of_a_day_at_most() {
        let own = |list: &[(&'static str, &str)]| {
            let own = read(list, "{}").objectives;
            (own.ttft_us, own.tbt_us)
        };
        assert_eq!(own(&[]), (None, None));
        assert_eq!(own(&[("x-slo-ttft-ms", "1")]), (Some(1_000), None));
        assert_eq!(own(&[("x-slo-tbt-ms", "86400000")]), (None, Some(86_400_000_000)));
        assert_eq!(
            own(&[("x-slo-ttft-ms", "1500"), ("x-slo-tbt-ms", "40")]),
            (Some(1_500_000), Some(40_000))
        );
        for header in OBJECTIVE_HEADERS {
            for wrong in ["0", "86400001", "-1", "+5", "1.5", "1e3", "2s", "ten", "", "99999999999999999999"]
            {
                let list = headers(&[(header, wrong)]);
                let error =
                    Caller::read(&list, &Fields::default(), &RouterConfig::default(), "m").unwrap_err();
                assert_eq!((error.status, error.param), (400, Some(header)), "{wrong:?}");
                assert!(error.message.contains(header) && error.message.contains("86400000"), "{error:?}");
            }
        }
        let mut odd = HeaderMap::new();
        odd.insert("x-slo-ttft-ms", http::HeaderValue::from_bytes(b"5\xb5").unwrap());
        assert_eq!(objectives(&odd).unwrap_err().status, 400, "no text");
    }

    #[test]
    fn a_key_has_the_classes_that_it_lists_and_no_other() {
        let limited = |classes: &[&str]| RouterConfig {
            api_keys: vec![ApiKey {
                key: "k".into(),
                tenant: None,
                classes: classes.iter().map(|&class| class.into()).collect(),
            }]
            .into(),
            ..RouterConfig::default()
        };
        let ask = |classes: &[&str], header: Option<&str>, body: &str| {
            let fields = crate::fields::read(body.as_bytes()).unwrap();
            let mut list = vec![("authorization", "Bearer k")];
            list.extend(header.map(|class| ("x-baton-class", class)));
            Caller::read(&headers(&list), &fields, &limited(classes), "m").map(|caller| caller.class)
        };
        let two = ["batch", "flex"];
        for (header, body, class) in [
            (None, "{}", "batch"),
            (None, r#"{"service_tier":"auto"}"#, "batch"),
            (Some("flex"), "{}", "flex"),
            (None, r#"{"service_tier":"flex"}"#, "flex"),
            // A tier of the API's that the key does not list is no claim.
            (None, r#"{"service_tier":"priority"}"#, "batch"),
            (Some("batch"), r#"{"service_tier":"gold"}"#, "batch"),
        ] {
            assert_eq!(ask(&two, header, body).unwrap().as_deref(), Some(class), "{header:?} {body}");
        }
        for (header, body, param) in [
            (Some("gold"), "{}", Some("x-baton-class")),
            (Some("priority"), "{}", Some("x-baton-class")),
            (Some("gold"), r#"{"service_tier":"batch"}"#, Some("x-baton-class")),
            (None, r#"{"service_tier":"gold"}"#, Some("service_tier")),
        ] {
            let error = ask(&two, header, body).unwrap_err();
            assert_eq!(
                (error.status, error.code.as_deref()),
                (403, Some("class_not_allowed")),
                "{header:?} {body}"
            );
            assert_eq!((error.param, error.kind()), (param, "permission_error"));
            assert!(error.message.contains("batch, flex"), "{}", error.message);
        }
        assert_eq!(ask(&[], Some("gold"), "{}").unwrap().as_deref(), Some("gold"), "a key without a list");
        assert_eq!(ask(&[], None, "{}").unwrap(), None);
    }

    #[test]
    fn request_ids_are_kept_if_they_can_be() {
        assert_eq!(&*request_id(&headers(&[("x-request-id", "abc-1")])), "abc-1");
        assert!(request_id(&headers(&[("x-request-id", "a b")])).starts_with("req-"));
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }

    #[test]
    fn namespaces_cannot_be_mistaken() {
        assert_ne!(namespace("r", Some("a"), None), namespace("r", None, Some("a")));
        assert_ne!(namespace("rt", None, None), namespace("r", Some(""), None));
        assert_ne!(namespace("r", Some("ab"), Some("c")), namespace("r", Some("a"), Some("bc")));
    }
}
