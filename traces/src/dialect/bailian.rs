//! Qwen-Bailian: flat rows in seconds, chats linked by parent, every row the whole prompt.

use serde_json::Value;

use crate::error::RowFault;
use crate::flat;
use crate::moment::stamp_ms;
use crate::parser::{Parse, Row, Sessions, Setup, length, required};
use crate::record::{Extra, Record};

/// Reads Bailian rows. The session of a row is the root of its chat tree.
pub(crate) struct Bailian {
    setup: Setup,
    roots: Sessions<Option<String>>,
}

impl Bailian {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { roots: Sessions::new(setup.limits.sessions), setup: setup.clone() }
    }

    fn link(&mut self, extra: &mut Extra) -> Result<(), RowFault> {
        let chat = required(extra.unknown.remove("chat_id").as_ref().and_then(id_text), "chat_id")?;
        let parent = extra.unknown.remove("parent_chat_id").as_ref().and_then(id_text);
        let parent = parent.filter(|id| id != "-1");
        let root = match &parent {
            Some(parent) => self.roots.get(parent)?.clone().unwrap_or_else(|| parent.clone()),
            None => chat.clone(),
        };
        *self.roots.get(&chat)? = Some(root.clone());
        extra.session_id = Some(root);
        extra.request_id = Some(chat);
        extra.parent = parent;
        Ok(())
    }
}

fn id_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

impl Parse for Bailian {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let limits = self.setup.limits;
        let row = flat::parse(row.json()?, &self.setup.columns, &limits)?;
        let mut extra = row.extra;
        self.link(&mut extra)?;
        let stamp = required(row.timestamp, "timestamp")?;
        out.push(Record {
            timestamp_ms: stamp_ms(&stamp, self.setup.unit)?,
            input_length: length(required(row.input_length, "input_length")?, "input_length", &limits)?,
            output_length: length(required(row.output_length, "output_length")?, "output_length", &limits)?,
            hash_ids: row.hash_ids.unwrap_or_default(),
            extra: Some(Box::new(extra)),
        });
        Ok(())
    }
}
