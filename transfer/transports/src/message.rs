//! The bodies of the frames that carry no KV, and the preface that comes before any frame.

use baton_transfer::Priority;

use crate::data_plane::LentWindow;
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{u32_at, u64_at};
use crate::mover::{PeerId, RemoteSegment, WindowId};
use crate::receiver::{HandoffTicket, Plan, SlicePosition};

/// The version of the protocol. Another version is refused before any frame is read.
pub const PROTOCOL_VERSION: u32 = 4;

/// Size of the preface.
pub(crate) const PREFACE_BYTES: usize = 16;
const MAGIC: &[u8; 8] = b"BATON-KV";
const TEXT_BYTES_MAX: usize = 255;
/// Longest name of a host.
pub(crate) const NAME_BYTES_MAX: usize = 255;

/// The first bytes that either side sends: the magic, the version, four zeros.
pub(crate) fn preface() -> [u8; PREFACE_BYTES] {
    let mut bytes = [0; PREFACE_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    bytes
}

/// Is the other side a Baton of our version?
pub(crate) fn check_preface(bytes: &[u8; PREFACE_BYTES]) -> Result<(), TransportError> {
    let wrong = |text: String| Err(TransportError::new(Kind::Invalid, Stage::Handshake, text));
    if bytes[..8] != *MAGIC {
        return wrong("the peer does not speak Baton's KV protocol; is the port right?".to_owned());
    }
    let theirs = u32_at(bytes, 8);
    if theirs != PROTOCOL_VERSION {
        let ours = PROTOCOL_VERSION;
        let remedy = "run the same release on both";
        return wrong(format!(
            "the peer speaks protocol version {theirs}, this node version {ours}: {remedy}"
        ));
    }
    Ok(())
}

/// The dialling side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) fingerprint: u64,
    pub(crate) host: String,
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = self.fingerprint.to_le_bytes().to_vec();
        put_text(&mut out, &self.host);
        out
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, TransportError> {
        let mut parts = Parts::new(body, Stage::Handshake);
        let (fingerprint, host) = (parts.u64()?, parts.text()?);
        parts.end()?;
        Ok(Self { fingerprint, host })
    }
}

/// A refusal or a failure, in the peer's words.
pub(crate) fn encode_failure(error: &TransportError) -> Vec<u8> {
    let mut out = vec![error.kind.number()];
    put_text(&mut out, &error.text);
    out
}

/// Decodes [`encode_failure`] to an error of this side at `stage`.
pub(crate) fn decode_failure(body: &[u8], stage: Stage) -> TransportError {
    let mut parts = Parts::new(body, stage);
    let read = |parts: &mut Parts<'_>| {
        let kind = Kind::from_number(parts.u8()?);
        let text = parts.text()?;
        parts.end()?;
        Ok((kind.ok_or_else(|| parts.broken())?, text))
    };
    match read(&mut parts) {
        Ok((kind, text)) => TransportError::new(kind, stage, format!("the peer says: {text}")),
        Err(error) => error,
    }
}

/// The body of an offer.
pub(crate) fn encode_offer(ticket: HandoffTicket, plan: &Plan) -> Vec<u8> {
    let mut out = ticket.request.to_le_bytes().to_vec();
    for number in [ticket.attempt, ticket.epoch, plan.blocks, plan.layers, plan.layer_bytes] {
        out.extend(number.to_le_bytes());
    }
    out
}

/// Decodes [`encode_offer`].
pub(crate) fn decode_offer(body: &[u8]) -> Result<(HandoffTicket, Plan), TransportError> {
    let mut parts = Parts::new(body, Stage::Serve);
    let ticket = HandoffTicket { request: parts.u64()?, attempt: parts.u32()?, epoch: parts.u32()? };
    let plan = Plan { blocks: parts.u32()?, layers: parts.u32()?, layer_bytes: parts.u32()? };
    parts.end()?;
    Ok((ticket, plan))
}

/// The body that lends a window; empty where there is nothing to write.
pub(crate) fn encode_window(window: Option<&LentWindow>) -> Vec<u8> {
    let mut out = Vec::new();
    let Some(window) = window else { return out };
    put_text(&mut out, &window.peer.address);
    for number in [window.peer.epoch, window.segment.window.0, window.segment.bytes] {
        out.extend(number.to_le_bytes());
    }
    for (transport, access) in &window.segment.access {
        // An access that is too long for the frame is left out: the other transports remain.
        let Ok(bytes) = u16::try_from(access.len()) else { continue };
        put_text(&mut out, transport);
        out.extend(bytes.to_le_bytes());
        out.extend(access);
    }
    out
}

/// Decodes [`encode_window`].
pub(crate) fn decode_window(body: &[u8]) -> Result<Option<LentWindow>, TransportError> {
    let mut parts = Parts::new(body, Stage::Offer);
    if parts.is_empty() {
        return Ok(None);
    }
    let peer = PeerId { address: parts.text()?, epoch: parts.u64()? };
    let (window, bytes) = (WindowId(parts.u64()?), parts.u64()?);
    let mut access = Vec::new();
    while !parts.is_empty() {
        let transport = parts.text()?;
        let bytes = u16::from_le_bytes([parts.u8()?, parts.u8()?]);
        access.push((transport, parts.take(bytes.into())?.to_vec()));
    }
    Ok(Some(LentWindow { peer, segment: RemoteSegment { window, bytes, access } }))
}

/// Slices of one [`encode_moved`] at most.
pub(crate) const MOVED_SLICES_MAX: usize = 4096;

/// The body that announces bytes of a hand-off: their checksum, and the slices that begin among them.
pub(crate) fn encode_moved(sum: u64, slices: &[SlicePosition]) -> Vec<u8> {
    let mut out = sum.to_le_bytes().to_vec();
    for at in slices {
        out.extend(at.block.to_le_bytes());
        out.extend(at.layer.to_le_bytes());
    }
    out
}

/// Decodes [`encode_moved`].
pub(crate) fn decode_moved(body: &[u8]) -> Result<(u64, Vec<SlicePosition>), TransportError> {
    let broken = || Parts::new(body, Stage::Serve).broken();
    let (sum, slices) = body.split_first_chunk::<8>().ok_or_else(broken)?;
    let (slices, rest) = slices.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(broken());
    }
    let at = |slice: &[u8; 8]| SlicePosition { block: u32_at(slice, 0), layer: u32_at(slice, 4) };
    Ok((u64::from_le_bytes(*sum), slices.iter().map(at).collect()))
}

/// The body of a want: its keys.
pub(crate) fn encode_keys(keys: &[u128]) -> Vec<u8> {
    keys.iter().flat_map(|key| key.to_le_bytes()).collect()
}

/// Decodes [`encode_keys`].
pub(crate) fn decode_keys(body: &[u8]) -> Result<Vec<u128>, TransportError> {
    let (keys, rest) = body.as_chunks::<16>();
    if !rest.is_empty() {
        return Err(Parts::new(body, Stage::Serve).broken());
    }
    Ok(keys.iter().map(|key| u128::from_le_bytes(*key)).collect())
}

/// A block that the holder lists before it moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldBlock {
    pub(crate) key: u128,
    pub(crate) bytes: u32,
    pub(crate) checksum: u64,
}

/// Size of one [`HeldBlock`] in a body.
pub(crate) const HELD_BYTES: usize = 28;

/// Encodes the list of blocks held.
pub(crate) fn encode_held(blocks: impl Iterator<Item = HeldBlock>) -> Vec<u8> {
    let mut out = Vec::new();
    for block in blocks {
        out.extend(block.key.to_le_bytes());
        out.extend(block.bytes.to_le_bytes());
        out.extend(block.checksum.to_le_bytes());
    }
    out
}

/// Decodes [`encode_held`].
pub(crate) fn decode_held(body: &[u8]) -> Result<Vec<HeldBlock>, TransportError> {
    let (blocks, rest) = body.as_chunks::<HELD_BYTES>();
    if !rest.is_empty() {
        return Err(Parts::new(body, Stage::Fetch).broken());
    }
    let block = |block: &[u8; HELD_BYTES]| HeldBlock {
        key: u128::from(u64_at(block, 8)) << 64 | u128::from(u64_at(block, 0)),
        bytes: u32_at(block, 16),
        checksum: u64_at(block, 20),
    };
    Ok(blocks.iter().map(block).collect())
}

/// A priority as a want carries it.
pub(crate) fn urgency(priority: Priority) -> u32 {
    u32::try_from(priority.index() + 1).expect("there are four")
}

/// Decodes [`urgency`]; [`Priority::Fetch`] for a number that this version does not know.
pub(crate) fn priority_of(urgency: u32) -> Priority {
    let place = usize::try_from(urgency).ok().and_then(|place| place.checked_sub(1));
    place.and_then(|place| Priority::ALL.get(place).copied()).unwrap_or(Priority::Fetch)
}

/// One byte of length and so much text, cut where a character ends.
fn put_text(out: &mut Vec<u8>, text: &str) {
    let cut = text.floor_char_boundary(TEXT_BYTES_MAX);
    out.push(u8::try_from(cut).expect("cut to 255 bytes"));
    out.extend(&text.as_bytes()[..cut]);
}

/// Takes a body apart from the front; every step checks what is left.
struct Parts<'a> {
    rest: &'a [u8],
    stage: Stage,
}

impl<'a> Parts<'a> {
    fn new(rest: &'a [u8], stage: Stage) -> Self {
        Self { rest, stage }
    }

    fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], TransportError> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or_else(|| self.broken())?;
        self.rest = rest;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, TransportError> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, TransportError> {
        Ok(u32_at(self.take(4)?, 0))
    }

    fn u64(&mut self) -> Result<u64, TransportError> {
        Ok(u64_at(self.take(8)?, 0))
    }

    fn text(&mut self) -> Result<String, TransportError> {
        let bytes = usize::from(self.u8()?);
        let text = self.take(bytes)?;
        String::from_utf8(text.to_vec()).map_err(|_| self.broken())
    }

    fn end(&self) -> Result<(), TransportError> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.broken()) }
    }

    fn broken(&self) -> TransportError {
        TransportError::new(Kind::Bug, self.stage, "the body of a frame does not have the form of its kind")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_survive_the_wire() {
        let hello = Hello { fingerprint: 5, host: "a".into() };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let ticket = HandoffTicket { request: 1, attempt: 2, epoch: 3 };
        let plan = Plan { blocks: 4, layers: 5, layer_bytes: 6 };
        assert_eq!(decode_offer(&encode_offer(ticket, &plan)), Ok((ticket, plan)));
        let slices = [(0, 1), (u32::MAX, 7)].map(|(block, layer)| SlicePosition { block, layer });
        assert_eq!(decode_moved(&encode_moved(77, &slices)), Ok((77, slices.to_vec())));
        assert_eq!(decode_moved(&encode_moved(u64::MAX, &[])), Ok((u64::MAX, vec![])));
        let keys = vec![1, u128::MAX, 7 << 70];
        assert_eq!(decode_keys(&encode_keys(&keys)), Ok(keys));
        let held = [(1 << 100, 0, 9), (u128::MAX - 2, u32::MAX, 1)].map(|(key, bytes, checksum)| HeldBlock {
            key,
            bytes,
            checksum,
        });
        assert_eq!(decode_held(&encode_held(held.into_iter())), Ok(held.to_vec()));
        for priority in Priority::ALL {
            assert_eq!(priority_of(urgency(priority)), priority);
        }
        assert_eq!([0, 5, u32::MAX].map(priority_of), [Priority::Fetch; 3]);
        let error = TransportError::new(Kind::Corrupt, Stage::Serve, "slice 3");
        let back = decode_failure(&encode_failure(&error), Stage::Send);
        assert_eq!((back.kind, back.stage), (Kind::Corrupt, Stage::Send));
        assert!(back.text.contains("slice 3"));
    }

    #[test]
    fn every_shortened_or_lengthened_body_is_refused() {
        let ticket = HandoffTicket { request: 1, attempt: 2, epoch: 3 };
        let offer = encode_offer(ticket, &Plan { blocks: 4, layers: 5, layer_bytes: 6 });
        let hello = Hello { fingerprint: 5, host: "host".into() }.encode();
        for cut in 0..offer.len() {
            assert_eq!(decode_offer(&offer[..cut]).unwrap_err().kind, Kind::Bug);
        }
        for cut in 0..hello.len() {
            assert!(Hello::decode(&hello[..cut]).is_err(), "cut at {cut}");
        }
        assert!(decode_offer(&[offer, vec![0]].concat()).is_err());
        assert!(Hello::decode(&[hello, vec![0]].concat()).is_err());
        assert!(decode_keys(&[0; 17]).is_err() && decode_held(&[0; HELD_BYTES + 1]).is_err());
        assert!(decode_moved(&[0; 7]).is_err() && decode_moved(&[0; 15]).is_err());
        assert_eq!(decode_failure(&[99, 0], Stage::Send).kind, Kind::Bug);
    }

    #[test]
    fn windows_survive_the_wire_and_cut_ones_are_found() {
        let access = vec![("tcp".to_owned(), vec![]), ("rdma".to_owned(), vec![7; 300])];
        let segment = RemoteSegment { window: WindowId(u64::MAX), bytes: 1 << 40, access };
        let told = LentWindow { peer: PeerId { address: "[::1]:9".into(), epoch: 3 }, segment };
        let body = encode_window(Some(&told));
        assert_eq!(decode_window(&body), Ok(Some(told)));
        assert_eq!((encode_window(None), decode_window(&[])), (vec![], Ok(None)));
        let torn = (1..body.len()).filter(|cut| decode_window(&body[..*cut]).is_err()).count();
        // A cut between two ways of access cannot be distinguished from a window that has fewer of them.
        assert_eq!(torn, body.len() - 3);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let mut out = Vec::new();
        put_text(&mut out, &"é".repeat(200));
        assert_eq!(Parts::new(&out, Stage::Serve).text(), Ok("é".repeat(127)));
    }

    #[test]
    fn prefaces_name_both_versions() {
        assert_eq!(check_preface(&preface()), Ok(()));
        let mut other = preface();
        other[8] = 9;
        let text = check_preface(&other).unwrap_err().text;
        assert!(text.contains("version 9") && text.contains("version 4"), "{text}");
        assert!(check_preface(b"GET / HTTP/1.1\r\n").unwrap_err().text.contains("port"));
    }

    /// Reads a body as each kind of frame. No body causes a panic, and the size of the result is bounded by the
    /// body's own bytes.
    fn read_as_everything(body: &[u8]) {
        let read = [
            Hello::decode(body).map(|hello| hello.encode().len()).ok(),
            decode_offer(body).map(|(ticket, plan)| encode_offer(ticket, &plan).len()).ok(),
            decode_window(body).map(|window| encode_window(window.as_ref()).len()).ok(),
            decode_moved(body).map(|(sum, slices)| encode_moved(sum, &slices).len()).ok(),
            decode_keys(body).map(|keys| encode_keys(&keys).len()).ok(),
            decode_held(body).map(|held| encode_held(held.into_iter()).len()).ok(),
        ];
        for bytes in read.into_iter().flatten() {
            assert_eq!(bytes, body.len(), "what is read is written again in as many bytes");
        }
        // The peer's words, with a few of ours before them.
        assert!(decode_failure(body, Stage::Serve).text.len() <= body.len() + 200);
    }

    /// One of each kind, as it goes over the wire.
    fn bodies() -> Vec<Vec<u8>> {
        let access = vec![("tcp".to_owned(), vec![1, 2, 3]), ("rdma".to_owned(), vec![9; 60])];
        let peer = PeerId { address: "10.0.0.1:7000".into(), epoch: 3 };
        let segment = RemoteSegment { window: WindowId(7), bytes: 1 << 20, access };
        let held = (0..4).map(|n| HeldBlock { key: n, bytes: 4_096, checksum: 77 });
        vec![
            Hello { fingerprint: 5, host: "machine".into() }.encode(),
            encode_offer(
                HandoffTicket { request: 1, attempt: 2, epoch: 3 },
                &Plan { blocks: 4, layers: 5, layer_bytes: 6 },
            ),
            encode_moved(9, &[SlicePosition { block: 1, layer: 2 }]),
            encode_window(Some(&LentWindow { peer, segment })),
            encode_keys(&[1, 2, u128::MAX]),
            encode_held(held),
            encode_failure(&TransportError::new(Kind::Invalid, Stage::Serve, "why")),
        ]
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(2_000))]

        #[test]
        fn no_body_makes_a_reader_panic(body in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            read_as_everything(&body);
        }

        #[test]
        fn no_change_of_a_body_makes_a_reader_panic(
            kind in 0usize..7,
            changes in proptest::collection::vec((0usize..200, proptest::prelude::any::<u8>()), 1..4),
            length in 0usize..300,
        ) {
            let mut body = bodies().swap_remove(kind);
            for (at, byte) in changes {
                let at = at % body.len();
                body[at] = byte;
            }
            body.resize(length.min(2 * body.len()), 0);
            read_as_everything(&body);
        }
    }
}
