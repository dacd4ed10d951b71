//! The hand-off from the prefill leg to the decode leg: checked when it is created and when it arrives, and used once.

use baton_types::ChainHasher;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::error::{Kind, RemoteError, Side, Stage};
use crate::nixl;
use crate::request::Request;

/// Longest hand-off that is read, bytes.
const MAX_BYTES: usize = 4 << 20;
/// Longest name within one.
const MAX_NAME_BYTES: usize = 1_024;

/// A prefilled prompt on its way to a decode engine. It is consumed by the decode leg: two legs from one hand-off would
/// read blocks that the first one has released.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handoff {
    /// Tokens of the prompt.
    prompt_tokens: u64,
    /// A digest of the prompt.
    digest: u64,
    /// When it was made, µs since 1970 by the clock of the prefill node.
    made_us: u64,
    /// When the lease ends, by the same clock.
    until_us: u64,
    pub(crate) way: Way,
}

/// How the decode engine finds the KV.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) enum Way {
    /// NixlConnector: what the prefill engine said, byte for byte.
    Nixl { params: Box<RawValue> },
    /// MooncakeConnector: where its bootstrap server is, and the name of the transfer.
    Mooncake { engine_id: String, bootstrap: String, transfer_id: String },
    /// SGLang's bootstrap room.
    Room {
        host: String,
        port: u16,
        room: u64,
        /// The data-parallel rank that prefills, of a server that has several.
        #[serde(default)]
        rank: Option<u32>,
    },
}

/// A hand-off on its way, so that what arrives is what was sent, or nothing.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedHandoff {
    /// Hash of the bytes of `handoff`.
    seal: u64,
    handoff: Box<RawValue>,
}

pub(crate) fn seal_of(bytes: &str) -> u64 {
    ChainHasher::new(0, bytes.as_bytes()).parent().short().0
}

impl Handoff {
    pub(crate) fn new(request: &Request, way: Way, lease: (u64, u64)) -> Self {
        Self {
            prompt_tokens: request.tokens.len() as u64,
            digest: request.tokens.digest(),
            made_us: lease.0,
            until_us: lease.1,
            way,
        }
    }

    /// For the way to the decode node.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        let why = "numbers, strings and JSON that was read before can be written";
        let handoff = to_raw_value(&self).expect(why);
        serde_json::to_vec(&SealedHandoff { seal: seal_of(handoff.get()), handoff }).expect(why)
    }

    /// As it came from the prefill node.
    ///
    /// # Errors
    /// [`Kind::Invalid`] when it is not one, is not as it was sent, or lacks a field without which the decode engine would
    /// fail or exit.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RemoteError> {
        if bytes.len() > MAX_BYTES {
            return Err(bad(format!("a hand-off of {} bytes is longer than {MAX_BYTES}", bytes.len())));
        }
        let unread = |error| bad(format!("the hand-off cannot be read: {error}"));
        let sealed: SealedHandoff = serde_json::from_slice(bytes).map_err(unread)?;
        if seal_of(sealed.handoff.get()) != sealed.seal {
            return Err(bad("the hand-off is not as it was sent: its seal is of other bytes"));
        }
        let read: Self = serde_json::from_str(sealed.handoff.get()).map_err(unread)?;
        read.check()?;
        Ok(read)
    }

    /// The name of what it lends; a second hand-off with it is the same one.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.way {
            Way::Nixl { params } => nixl::name(params).unwrap_or_default(),
            Way::Mooncake { transfer_id, .. } => transfer_id.clone(),
            Way::Room { host, port, room, .. } => format!("{host}:{port}/{room}"),
        }
    }

    /// How long the lease lasts from `now_us`, µs since 1970; 0 when it has run out.
    #[must_use]
    pub const fn left_us(&self, now_us: u64) -> u64 {
        self.until_us.saturating_sub(now_us)
    }

    pub(crate) const fn until_us(&self) -> u64 {
        self.until_us
    }

    /// Every field that the decode engine relies on.
    fn check(&self) -> Result<(), RemoteError> {
        if self.until_us <= self.made_us {
            return Err(bad("the hand-off's lease ends before it begins"));
        }
        match &self.way {
            Way::Nixl { params } => {
                nixl::check(params, self.prompt_tokens, None).map(drop).map_err(|what| bad(what.to_string()))
            }
            Way::Mooncake { engine_id, bootstrap, transfer_id } => {
                name_ok("engine_id", engine_id)?;
                name_ok("transfer_id", transfer_id)?;
                crate::http::base_of(bootstrap).map(drop).map_err(|error| bad(error.text))
            }
            Way::Room { host, port, room, rank: _ } => {
                name_ok("host", host)?;
                if *port == 0 || *room > i64::MAX as u64 {
                    return Err(bad(format!(
                        "port {port} and room {room} are not ones that a prefill engine opens"
                    )));
                }
                Ok(())
            }
        }
    }

    /// Whether `request` may be decoded from it now: all checks without which a decode engine answers wrongly, or exits.
    ///
    /// Returns how long the first token may take, µs.
    pub(crate) fn admit(&self, request: &Request, now_us: u64, margin_us: u64) -> Result<u64, RemoteError> {
        self.check()?;
        if self.prompt_tokens != request.tokens.len() as u64 || self.digest != request.tokens.digest() {
            let text = format!(
                "the hand-off is of another prompt ({} tokens) than the request ({} tokens)",
                self.prompt_tokens,
                request.tokens.len()
            );
            return Err(bad(text).remedy("give each decode leg the hand-off of its own prefill leg"));
        }
        if self.made_us > now_us.saturating_add(margin_us) {
            let ahead = self.made_us - now_us;
            return Err(bad(format!("the hand-off was made {ahead} µs in the future"))
                .remedy("set the clocks of the nodes: leases are told by them"));
        }
        let left = self.left_us(now_us).saturating_sub(margin_us);
        if left == 0 {
            let text = format!(
                "the lease of the prefilled blocks ends in {} µs, and {margin_us} µs are kept as a margin",
                self.left_us(now_us)
            );
            return Err(RemoteError::new(Kind::Retry, Side::Us, Stage::Handoff, text)
                .remedy("prefill again; bring hand-offs to their decode engines sooner"));
        }
        Ok(left)
    }
}

fn bad(text: impl Into<String>) -> RemoteError {
    RemoteError::ours(Stage::Handoff, text)
        .remedy("prefill again, and send on what the prefill leg gave, unchanged")
}

fn name_ok(what: &str, name: &str) -> Result<(), RemoteError> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(bad(format!("the hand-off's {what} has {} bytes", name.len())));
    }
    Ok(())
}

/// µs since 1970.
pub(crate) fn now_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::fields::ClientBody;

    fn request(tokens: &[u32]) -> Request {
        Request {
            id: "r".into(),
            tokens: tokens.to_vec().into(),
            sampling: Arc::default(),
            body: ClientBody::default(),
            salt: None,
        }
    }

    fn room() -> Way {
        Way::Room { host: "p".into(), port: 8_998, room: 5, rank: Some(1) }
    }

    fn nixl(text: &str) -> Way {
        Way::Nixl { params: RawValue::from_string(text.into()).unwrap() }
    }

    const PARAMS: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"q","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":3,  "odd":1.50}"#;

    #[test]
    fn a_handoff_survives_the_way() {
        let mooncake = Way::Mooncake {
            engine_id: "e".into(),
            bootstrap: "http://p:8998".into(),
            transfer_id: "t".into(),
        };
        for way in [room(), nixl(PARAMS), mooncake] {
            let sent = Handoff::new(&request(&[1, 2, 3]), way, (100, 200));
            let name = sent.name();
            let bytes = sent.into_bytes();
            let came = Handoff::from_bytes(&bytes).unwrap();
            assert_eq!(came.name(), name);
            assert_eq!(came.into_bytes(), bytes);
        }
    }

    #[test]
    fn what_nixl_said_stays_byte_for_byte() {
        let sent = Handoff::new(&request(&[1, 2, 3]), nixl(PARAMS), (100, 200)).into_bytes();
        let Way::Nixl { params } = Handoff::from_bytes(&sent).unwrap().way else { panic!("another way") };
        assert_eq!(params.get(), PARAMS);
    }

    #[test]
    fn only_the_same_prompt_within_the_lease_is_admitted() {
        let handoff = Handoff::new(&request(&[1, 2, 3]), room(), (1_000, 2_000));
        let admit = |tokens: &[u32], now| handoff.admit(&request(tokens), now, 100);
        assert_eq!(admit(&[1, 2, 3], 1_200), Ok(700));
        assert_eq!(admit(&[1, 2, 3], 899).unwrap_err().kind, Kind::Invalid);
        assert_eq!(admit(&[1, 2, 4], 1_200).unwrap_err().stage, Stage::Handoff);
        assert!(admit(&[1, 2], 1_200).is_err() && admit(&[1, 2, 3, 4], 1_200).is_err());
        for late in [1_900, 2_000, 1 << 60] {
            assert_eq!(admit(&[1, 2, 3], late).unwrap_err().kind, Kind::Retry);
        }
    }

    #[test]
    fn what_lacks_something_is_refused() {
        let handoff = Handoff::new(&request(&[1]), room(), (1, 2));
        let good = serde_json::to_string(&handoff).unwrap();
        let sealed = |text: &str| format!("{{\"seal\":{},\"handoff\":{text}}}", seal_of(text)).into_bytes();
        assert!(Handoff::from_bytes(&sealed(&good)).is_ok());
        for (from, to) in [
            ("\"port\":8998", "\"port\":0"),
            ("\"room\":5", "\"room\":9223372036854775808"),
            ("\"host\":\"p\"", "\"host\":\"\""),
            ("\"until_us\":2", "\"until_us\":1"),
            ("\"until_us\":2,", ""),
            ("Room", "Lounge"),
        ] {
            let bad = good.replace(from, to);
            assert_ne!(bad, good);
            assert_eq!(Handoff::from_bytes(&sealed(&bad)).unwrap_err().stage, Stage::Handoff, "{bad}");
        }
        assert!(Handoff::from_bytes(&vec![b' '; MAX_BYTES + 1]).is_err());
    }

    #[test]
    fn a_handoff_of_which_any_byte_has_changed_is_refused() {
        for way in [room(), nixl(PARAMS)] {
            let good = Handoff::new(&request(&[1, 2, 3]), way, (100, 200)).into_bytes();
            for at in 0..good.len() {
                for flip in [1, 4, 16, 64] {
                    let mut bad = good.clone();
                    bad[at] ^= flip;
                    let error = Handoff::from_bytes(&bad).unwrap_err();
                    assert_eq!((error.kind, error.stage), (Kind::Invalid, Stage::Handoff));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            prop_assert!(Handoff::from_bytes(&bytes).is_err());
        }
    }
}
