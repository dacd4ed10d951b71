//! Reaching a peer, and agreeing with it on version, mechanism and socket types.

use bytes::{Buf as _, Bytes, BytesMut};
use std::fmt;

use super::frame::command;
use crate::error::{EventError, Kind, Stage};

/// Bytes of a greeting.
pub(super) const GREETING_BYTES: usize = 64;
/// Mechanism, from here on, twenty bytes filled up with zeros.
const MECHANISM_AT: usize = 12;
const MECHANISM_BYTES: usize = 20;

/// A TCP address as ZeroMQ writes it: `tcp://HOST:PORT`, where a host of `*` means every interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint(String);

impl Endpoint {
    /// # Errors
    /// `Invalid` for other transports and for what is no address.
    pub(crate) fn parse(text: &str) -> Result<Self, EventError> {
        let invalid = |why: &str| {
            EventError::new(Kind::Invalid, Stage::Bind, format!("'{text}' {why}; write tcp://HOST:PORT"))
        };
        let address = text.strip_prefix("tcp://").ok_or_else(|| invalid("is no tcp endpoint"))?;
        let (host, port) = address.rsplit_once(':').ok_or_else(|| invalid("has no port"))?;
        port.parse::<u16>().map_err(|_| invalid("has no port"))?;
        match host {
            "" => Err(invalid("has no host")),
            "*" => Ok(Self(format!("0.0.0.0:{port}"))),
            _ => Ok(Self(address.to_owned())),
        }
    }

    /// The address as `HOST:PORT`.
    pub(crate) fn address(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}", self.0)
    }
}

/// The socket type of our end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Sub,
    Pub,
    Dealer,
    Router,
}

impl Role {
    const fn name(self) -> &'static str {
        match self {
            Self::Sub => "SUB",
            Self::Pub => "PUB",
            Self::Dealer => "DEALER",
            Self::Router => "ROUTER",
        }
    }

    /// The socket types that may be at the other end.
    const fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Sub => &["PUB", "XPUB"],
            Self::Pub => &["SUB", "XSUB"],
            Self::Dealer => &["ROUTER", "DEALER", "REP"],
            Self::Router => &["DEALER", "REQ", "ROUTER"],
        }
    }
}

/// The greeting: signature, version 3.0, mechanism NULL.
pub(super) fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[MECHANISM_AT..MECHANISM_AT + 4].copy_from_slice(b"NULL");
    bytes
}

fn refused(kind: Kind, message: impl Into<String>) -> EventError {
    EventError::new(kind, Stage::Handshake, message)
}

/// Judges a peer's greeting.
pub(super) fn judge_greeting(bytes: &[u8]) -> Result<(), EventError> {
    if bytes[0] != 0xff || bytes[9] & 1 != 1 {
        return Err(refused(Kind::Invalid, "the peer does not speak ZeroMQ: check host and port"));
    }
    if bytes[10] < 3 {
        return Err(refused(Kind::Invalid, format!("the peer speaks ZMTP {}, not 3", bytes[10])));
    }
    let mechanism = &bytes[MECHANISM_AT..MECHANISM_AT + MECHANISM_BYTES];
    let name = mechanism.split(|byte| *byte == 0).next().unwrap_or_default();
    if name != b"NULL" {
        let name = String::from_utf8_lossy(name);
        return Err(refused(
            Kind::Invalid,
            format!("the peer demands security '{name}': only NULL is spoken"),
        ));
    }
    Ok(())
}

/// The body of our READY command.
pub(super) fn ready(role: Role) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in [("Socket-Type", role.name()), ("Identity", "")] {
        body.push(u8::try_from(name.len()).expect("names of properties are short"));
        body.extend(name.as_bytes());
        body.extend(u32::try_from(value.len()).expect("values of properties are short").to_be_bytes());
        body.extend(value.as_bytes());
    }
    body
}

/// Judges a peer's first command.
pub(super) fn judge_ready(role: Role, body: &Bytes) -> Result<(), EventError> {
    match command(body) {
        Some((b"READY", properties)) => {
            let kind = socket_type(properties);
            let fits = |kind: &String| role.peers().contains(&kind.as_str());
            if kind.as_ref().is_some_and(fits) {
                return Ok(());
            }
            let kind = kind.unwrap_or_else(|| "no type".into());
            let message = format!("a {} socket cannot talk to {kind}: check the port", role.name());
            Err(refused(Kind::Invalid, message))
        }
        Some((b"ERROR", reason)) => {
            let reason = String::from_utf8_lossy(reason.get(1..).unwrap_or_default()).into_owned();
            Err(refused(Kind::Invalid, format!("the peer refuses: {reason}")))
        }
        _ => Err(refused(Kind::Corrupt, "the peer's first command is not READY")),
    }
}

fn socket_type(mut properties: Bytes) -> Option<String> {
    while properties.has_remaining() {
        let name_bytes = usize::from(properties.get_u8());
        if properties.len() < name_bytes + 4 {
            return None;
        }
        let name = properties.split_to(name_bytes);
        let value_bytes = properties.get_u32() as usize;
        if properties.len() < value_bytes {
            return None;
        }
        let value = properties.split_to(value_bytes);
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return String::from_utf8(value.to_vec()).ok();
        }
    }
    None
}

/// A subscription, or its end, to everything whose topic starts with `prefix`.
pub(crate) fn subscription(wanted: bool, prefix: &[u8]) -> BytesMut {
    let mut body = BytesMut::with_capacity(1 + prefix.len());
    body.extend_from_slice(&[u8::from(wanted)]);
    body.extend_from_slice(prefix);
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_tcp_with_host_and_port() {
        assert_eq!(Endpoint::parse("tcp://127.0.0.1:5557").unwrap().address(), "127.0.0.1:5557");
        assert_eq!(Endpoint::parse("tcp://*:0").unwrap().to_string(), "tcp://0.0.0.0:0");
        assert_eq!(Endpoint::parse("tcp://[::1]:1").unwrap().address(), "[::1]:1");
        for (text, why) in [
            ("ipc://x", "no tcp endpoint"),
            ("tcp://host", "no port"),
            ("tcp://host:99999", "no port"),
            ("tcp://:5", "no host"),
        ] {
            let error = Endpoint::parse(text).unwrap_err();
            assert!(error.message.contains(why) && error.kind == Kind::Invalid, "{error}");
        }
    }

    #[test]
    fn greetings_of_others_are_refused_with_the_reason() {
        assert_eq!(judge_greeting(&greeting()), Ok(()));
        let mut http = [b'H'; GREETING_BYTES];
        assert!(judge_greeting(&http).unwrap_err().message.contains("does not speak ZeroMQ"));
        http = greeting();
        http[10] = 2;
        assert!(judge_greeting(&http).unwrap_err().message.contains("ZMTP 2"));
        let mut curve = greeting();
        curve[MECHANISM_AT..MECHANISM_AT + 5].copy_from_slice(b"CURVE");
        assert!(judge_greeting(&curve).unwrap_err().message.contains("CURVE"));
    }

    fn named(name: &str, body: &[u8]) -> Bytes {
        Bytes::from([&[name.len() as u8], name.as_bytes(), body].concat())
    }

    #[test]
    fn only_sockets_that_fit_are_talked_to() {
        assert_eq!(judge_ready(Role::Sub, &named("READY", &ready(Role::Pub))), Ok(()));
        assert_eq!(judge_ready(Role::Router, &named("READY", &ready(Role::Dealer))), Ok(()));
        let wrong = judge_ready(Role::Sub, &named("READY", &ready(Role::Router))).unwrap_err();
        assert!(wrong.message.contains("cannot talk to ROUTER"), "{wrong}");
        let told = judge_ready(Role::Sub, &named("ERROR", b"\x02no")).unwrap_err();
        assert!(told.message.contains("refuses: no"), "{told}");
        assert!(judge_ready(Role::Sub, &named("HELLO", &[])).is_err());
        for cut in 0..ready(Role::Pub).len() {
            let _ = judge_ready(Role::Sub, &named("READY", &ready(Role::Pub)[..cut]));
        }
    }

    #[test]
    fn a_subscription_is_its_mark_and_its_prefix() {
        assert_eq!(&subscription(true, b"kv")[..], b"\x01kv");
        assert_eq!(&subscription(false, b"")[..], b"\x00");
    }
}
