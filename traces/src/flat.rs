//! One JSON row of the Mooncake family: known fields by any of their names, the rest kept.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::RowFault;
use crate::options::{Columns, Limits};
use crate::record::Extra;

/// A row as written, before units, sessions and blocks are settled.
#[derive(Debug, Default)]
pub(crate) struct FlatRow {
    pub(crate) timestamp: Option<Stamp>,
    pub(crate) delay_ms: Option<f64>,
    pub(crate) tool_wait_ms: Option<f64>,
    pub(crate) input_length: Option<i64>,
    pub(crate) output_length: Option<i64>,
    pub(crate) hash_ids: Option<Vec<u64>>,
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) text: Vec<String>,
    pub(crate) delta: Option<bool>,
    pub(crate) extra: Extra,
}

/// A point in time as written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Stamp {
    Number(f64),
    Text(String),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Timestamp,
    Delay,
    ToolWait,
    Input,
    Output,
    Ids,
    PromptIds,
    Text,
    Messages,
    Payload,
    Mode,
    Request,
    Session,
    Priority,
    StrictPriority,
    Class,
    Tenant,
    Lora,
    Salt,
    SloTtft,
    SloTbt,
    CancelAfter,
    Parent,
    WaitFor,
    Other,
}

fn field_of(key: &str, columns: &Columns) -> Field {
    let named = |column: &Option<String>| column.as_deref() == Some(key);
    match key {
        _ if named(&columns.timestamp) => Field::Timestamp,
        _ if named(&columns.input_length) => Field::Input,
        _ if named(&columns.output_length) => Field::Output,
        _ if named(&columns.hash_ids) => Field::Ids,
        "timestamp" | "created_time" if columns.timestamp.is_none() => Field::Timestamp,
        "input_length" | "input_tokens" if columns.input_length.is_none() => Field::Input,
        "output_length" | "output_tokens" if columns.output_length.is_none() => Field::Output,
        "hash_ids" if columns.hash_ids.is_none() => Field::Ids,
        "delay" | "delay_ms" => Field::Delay,
        "tool_wait_ms" => Field::ToolWait,
        "prompt_token_ids" => Field::PromptIds,
        "text_input" | "text" => Field::Text,
        "messages" => Field::Messages,
        "payload" => Field::Payload,
        "message_mode" | "context" => Field::Mode,
        "request_id" => Field::Request,
        "session_id" => Field::Session,
        "priority" => Field::Priority,
        "strict_priority" => Field::StrictPriority,
        "class" | "policy_class" => Field::Class,
        "tenant" => Field::Tenant,
        "lora" => Field::Lora,
        "salt" | "cache_salt" => Field::Salt,
        "slo_ttft_ms" => Field::SloTtft,
        "slo_tbt_ms" => Field::SloTbt,
        "cancel_after_ms" => Field::CancelAfter,
        "parent" => Field::Parent,
        "wait_for" => Field::WaitFor,
        _ => Field::Other,
    }
}

/// Parses one line.
pub(crate) fn parse(line: &[u8], columns: &Columns, limits: &Limits) -> Result<FlatRow, RowFault> {
    let mut json = serde_json::Deserializer::from_slice(line);
    RowSeed { columns, limits }
        .deserialize(&mut json)
        .and_then(|row| json.end().map(|()| row))
        .map_err(json_fault)
}

/// A JSON error as a fault of the row; the line number inside the row is always 1 and left out.
pub(crate) fn json_fault(error: serde_json::Error) -> RowFault {
    let column = error.column();
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text).to_string();
    let place = if column > 0 { format!(" at byte {column}") } else { String::new() };
    if text.starts_with("over the bound") {
        return RowFault::bound(format!("{text}{place}"), "fix or remove the row");
    }
    RowFault::parse(
        format!("{text}{place}"),
        "fix or remove the row, or name the dialect if it was taken for the wrong one",
    )
}

struct RowSeed<'a> {
    columns: &'a Columns,
    limits: &'a Limits,
}

impl<'de> DeserializeSeed<'de> for RowSeed<'_> {
    type Value = FlatRow;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<FlatRow, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for RowSeed<'_> {
    type Value = FlatRow;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one JSON object a line")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FlatRow, A::Error> {
        let mut row = FlatRow::default();
        while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            match field_of(&key, self.columns) {
                Field::Ids => row.hash_ids = map.next_value_seed(Ids(self.limits.ids))?,
                Field::Other => {
                    let value = map.next_value()?;
                    row.extra.unknown.insert(key.into_owned(), value);
                }
                field => row.take(field, &mut map)?,
            }
        }
        Ok(row)
    }
}

impl FlatRow {
    fn take<'de, A: MapAccess<'de>>(&mut self, field: Field, map: &mut A) -> Result<(), A::Error> {
        let extra = &mut self.extra;
        match field {
            Field::Timestamp => self.timestamp = map.next_value::<Option<Stamp>>()?,
            Field::Delay => self.delay_ms = map.next_value()?,
            Field::ToolWait => self.tool_wait_ms = map.next_value()?,
            Field::Input => self.input_length = whole(map)?,
            Field::Output => self.output_length = whole(map)?,
            Field::PromptIds => {
                let ids: Option<Vec<IgnoredAny>> = map.next_value()?;
                self.prompt_tokens = ids.map(|ids| ids.len() as u64);
            }
            Field::Text => self.text.extend(map.next_value::<Option<String>>()?),
            Field::Messages => texts_of(&map.next_value()?, &mut self.text),
            Field::Payload => texts_of_payload(&map.next_value()?, &mut self.text),
            Field::Mode => self.delta = Some(map.next_value::<String>()? == "delta"),
            Field::Request => extra.request_id = name(map)?,
            Field::Session => extra.session_id = name(map)?,
            Field::Priority => extra.priority = map.next_value()?,
            Field::StrictPriority => extra.strict_priority = map.next_value()?,
            Field::Class => extra.class = name(map)?,
            Field::Tenant => extra.tenant = name(map)?,
            Field::Lora => extra.lora = name(map)?,
            Field::Salt => extra.salt = name(map)?,
            Field::SloTtft => extra.slo_ttft_ms = map.next_value()?,
            Field::SloTbt => extra.slo_tbt_ms = map.next_value()?,
            Field::CancelAfter => extra.cancel_after_ms = map.next_value()?,
            Field::Parent => extra.parent = name(map)?,
            Field::WaitFor => {
                let names: Option<Vec<Name>> = map.next_value()?;
                extra.wait_for = names.into_iter().flatten().map(|n| n.0).collect();
            }
            Field::Ids | Field::Other => {}
        }
        Ok(())
    }
}

/// Collects the text of an OpenAI-style message list, role first so that roles are part of it.
pub(crate) fn texts_of(messages: &Value, out: &mut Vec<String>) {
    for message in messages.as_array().into_iter().flatten() {
        let role = message.get("role").and_then(Value::as_str).unwrap_or("user");
        match message.get("content") {
            Some(Value::String(text)) => out.push(format!("{role}\n{text}")),
            Some(Value::Null) | None => out.push(role.to_string()),
            Some(parts) => out.push(format!("{role}\n{parts}")),
        }
    }
}

/// Collects the text of a whole request body.
pub(crate) fn texts_of_payload(payload: &Value, out: &mut Vec<String>) {
    match payload.get("messages") {
        Some(messages) => texts_of(messages, out),
        None => match payload.get("prompt").or_else(|| payload.get("input")) {
            Some(Value::String(text)) => out.push(text.clone()),
            Some(other) => out.push(other.to_string()),
            None => out.push(payload.to_string()),
        },
    }
}

fn whole<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Option<i64>, A::Error> {
    Ok(map.next_value::<Option<WholeNumber>>()?.map(|whole| whole.0))
}

fn name<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Option<String>, A::Error> {
    Ok(map.next_value::<Option<Name>>()?.map(|name| name.0))
}

/// A whole number, also where it is written with a point.
pub(crate) struct WholeNumber(pub(crate) i64);

impl<'de> Deserialize<'de> for WholeNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeVisitor;
        impl Visitor<'_> for WholeVisitor {
            type Value = WholeNumber;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number of tokens")
            }
            fn visit_u64<E: Error>(self, v: u64) -> Result<WholeNumber, E> {
                i64::try_from(v).map(WholeNumber).map_err(|_| E::custom("over the bound of 2^63"))
            }
            fn visit_i64<E: Error>(self, v: i64) -> Result<WholeNumber, E> {
                Ok(WholeNumber(v))
            }
            #[expect(clippy::cast_possible_truncation, reason = "checked to be whole and small")]
            fn visit_f64<E: Error>(self, v: f64) -> Result<WholeNumber, E> {
                if v.fract() == 0.0 && v.abs() < 9e15 {
                    Ok(WholeNumber(v as i64))
                } else {
                    Err(E::custom(format!("{v} is not a whole number of tokens")))
                }
            }
        }
        deserializer.deserialize_any(WholeVisitor)
    }
}

/// A name, also where it is written as a number.
pub(crate) struct Name(pub(crate) String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl Visitor<'_> for NameVisitor {
            type Value = Name;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name (text or whole number)")
            }
            fn visit_str<E: Error>(self, v: &str) -> Result<Name, E> {
                Ok(Name(v.to_string()))
            }
            fn visit_u64<E: Error>(self, v: u64) -> Result<Name, E> {
                Ok(Name(v.to_string()))
            }
            fn visit_i64<E: Error>(self, v: i64) -> Result<Name, E> {
                Ok(Name(v.to_string()))
            }
        }
        deserializer.deserialize_any(NameVisitor)
    }
}

impl<'de> Deserialize<'de> for Stamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StampVisitor;
        #[expect(clippy::cast_precision_loss, reason = "2^53 ns is exact to 256 ns at today's date")]
        impl Visitor<'_> for StampVisitor {
            type Value = Stamp;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time (number or ISO 8601 text)")
            }
            fn visit_str<E: Error>(self, v: &str) -> Result<Stamp, E> {
                Ok(v.parse().map_or_else(|_| Stamp::Text(v.to_string()), Stamp::Number))
            }
            fn visit_u64<E: Error>(self, v: u64) -> Result<Stamp, E> {
                Ok(Stamp::Number(v as f64))
            }
            fn visit_i64<E: Error>(self, v: i64) -> Result<Stamp, E> {
                Ok(Stamp::Number(v as f64))
            }
            fn visit_f64<E: Error>(self, v: f64) -> Result<Stamp, E> {
                Ok(Stamp::Number(v))
            }
        }
        deserializer.deserialize_any(StampVisitor)
    }
}

/// Block ids, refused beyond a bound before they are stored.
pub(crate) struct Ids(pub(crate) u64);

impl<'de> DeserializeSeed<'de> for Ids {
    type Value = Option<Vec<u64>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Ids {
    type Value = Option<Vec<u64>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of block ids (whole numbers >= 0)")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = seq.next_element::<u64>()? {
            if ids.len() as u64 == self.0 {
                return Err(A::Error::custom(format!("over the bound of {} block ids", self.0)));
            }
            ids.push(id);
        }
        Ok(Some(ids))
    }
}

/// The object in a line, for dialects that are read as a whole.
pub(crate) fn object(line: &[u8]) -> Result<Map<String, Value>, RowFault> {
    match serde_json::from_slice(line).map_err(json_fault)? {
        Value::Object(map) => Ok(map),
        _ => Err(RowFault::parse("the row is not a JSON object", "give one JSON object a line")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(text: &str) -> Result<FlatRow, RowFault> {
        parse(text.as_bytes(), &Columns::default(), &Limits::default())
    }

    #[test]
    fn aliases_names_as_numbers_and_unknown_fields() {
        let row =
            row(r#"{"created_time":1.5,"input_tokens":8.0,"output_tokens":2,"delay_ms":3,"hash_ids":null,
                "session_id":7,"policy_class":"batch","weird":{"a":[1]},"priority":-3}"#)
            .unwrap();
        assert_eq!(row.timestamp, Some(Stamp::Number(1.5)));
        assert_eq!((row.input_length, row.output_length), (Some(8), Some(2)));
        assert_eq!(row.delay_ms, Some(3.0));
        assert_eq!(row.extra.session_id.as_deref(), Some("7"));
        assert_eq!(row.extra.class.as_deref(), Some("batch"));
        assert_eq!(row.extra.priority, Some(-3));
        assert_eq!(row.extra.unknown["weird"]["a"][0], 1);
        assert!(row.hash_ids.is_none());
    }

    #[test]
    fn own_column_names_replace_the_usual_ones() {
        let columns = Columns { timestamp: Some("t".into()), ..Columns::default() };
        let row = parse(br#"{"t":4,"timestamp":9}"#, &columns, &Limits::default()).unwrap();
        assert_eq!(row.timestamp, Some(Stamp::Number(4.0)));
        assert_eq!(row.extra.unknown["timestamp"], 9);
    }

    #[test]
    fn wrong_values_are_refused_with_the_place() {
        for (text, part) in [
            (r#"{"hash_ids":[1,-2]}"#, "-2"),
            (r#"{"input_length":1.5}"#, "1.5"),
            (r#"{"hash_ids":[1,2"#, "EOF"),
            (r#"{"timestamp":true}"#, "a time"),
            (r#"[1]"#, "object"),
            (r#"{"input_length":1} x"#, "trailing"),
        ] {
            let fault = row(text).unwrap_err();
            assert!(fault.problem.contains(part), "{text}: {}", fault.problem);
        }
    }

    #[test]
    fn too_many_ids_are_refused_as_a_bound() {
        let limits = Limits { ids: 2, ..Limits::default() };
        let fault = parse(br#"{"hash_ids":[1,2,3]}"#, &Columns::default(), &limits).unwrap_err();
        assert_eq!(fault.stage, crate::error::Stage::Bound);
    }
}
