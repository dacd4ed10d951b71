//! Reading a batch.

use super::Limits;
use super::draft::{Draft, RemainingLimits, whole};
use super::field::Field;
use crate::error::EventError;
use crate::model::{Batch, Event};
use crate::msgpack::{Reader, ValueKind};

type DecodeResult<T> = Result<T, EventError>;

/// The sequence number in its frame: eight bytes, big endian.
///
/// # Errors
/// `Corrupt` where the frame has another length.
pub fn sequence_of(frame: &[u8]) -> Result<u64, EventError> {
    let bytes = frame.try_into();
    let wrong = |_| EventError::decode(format!("a sequence of {} bytes, not 8", frame.len()));
    bytes.map(u64::from_be_bytes).map_err(wrong)
}

/// Reads a batch of any known dialect: events as maps or as arrays, hashes as integers of either sign or as
/// digests, token ids as a list or as little-endian words, the names of vLLM, SGLang or RFC 1527.
///
/// Fields that are not known are passed over; events that are not known come back as such.
///
/// # Errors
/// `Corrupt`, saying what is wrong and where: bytes that are no batch, an event without its hashes, anything
/// beyond `limits`. Nothing is allocated that the bytes themselves do not pay for.
pub fn decode(sequence: u64, payload: &[u8], limits: &Limits) -> Result<Batch, EventError> {
    if payload.len() > limits.batch_bytes {
        let message = format!("a batch of {} bytes, at most {} are taken", payload.len(), limits.batch_bytes);
        return Err(EventError::decode(message));
    }
    let mut reader = Reader::new(payload);
    let fields = reader.array()?;
    if fields < 2 {
        return Err(EventError::decode(format!("a batch of {fields} fields, not time and events")));
    }
    let time_us = microseconds(reader.float()?);
    let count = reader.array()?;
    if count > limits.events {
        let message = format!("a batch of {count} events, at most {} are taken", limits.events);
        return Err(EventError::decode(message));
    }
    let mut room = RemainingLimits::new(limits);
    // An event is some fifty times its smallest form: room is made as they come.
    let mut events = Vec::with_capacity(count.min(64));
    for _ in 0..count {
        events.push(event(&mut reader, &mut room)?);
    }
    let dp_rank = match fields {
        2 => None,
        _ if reader.nil()? => None,
        _ => Some(reader.word()?),
    };
    Ok(Batch { sequence, time_us, dp_rank, events })
}

/// A time since 1970 in seconds, or in milliseconds: taken for seconds, those would be past the year 5000.
fn microseconds(time: f64) -> u64 {
    whole(if time < 1e11 { time * 1e6 } else { time * 1e3 })
}

fn event(reader: &mut Reader<'_>, room: &mut RemainingLimits) -> DecodeResult<Event> {
    match reader.peek()? {
        ValueKind::Map => {
            let mut draft = Draft::default();
            for _ in 0..reader.map()? {
                let field = match reader.peek()? {
                    ValueKind::Text | ValueKind::Bytes => Field::named(reader.raw()?),
                    _ => {
                        reader.skip()?;
                        Field::Unknown
                    }
                };
                draft.read(field, reader, room)?;
            }
            draft.finish()
        }
        ValueKind::Array => placed(reader, room),
        other => Err(EventError::decode(format!("an event that is {other:?}, neither map nor array"))),
    }
}

/// An event of the array form: its kind, then its fields by place.
fn placed(reader: &mut Reader<'_>, room: &mut RemainingLimits) -> DecodeResult<Event> {
    let count = reader.array()?;
    if count == 0 {
        return Err(EventError::decode("an event without its type"));
    }
    let mut draft = Draft::of(reader.text()?);
    let fields = draft.kind().map_or(&[][..], Field::placed);
    for place in 0..count - 1 {
        let field = fields.get(place).copied().unwrap_or(Field::Unknown);
        draft.read(field, reader, room)?;
    }
    draft.finish()
}
