//! Reads the callers' requests field by field. An error names the field, and unknown fields are noted.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::error::IndexerError;
use crate::index::Context;

/// Bytes of a name at most.
const NAME_BYTES_MAX: usize = 512;
/// Tokens of a block at most.
const BLOCK_TOKENS_MAX: u32 = 1 << 20;
/// The tenant of those who name none.
const TENANT: &str = "default";

/// The publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Publisher {
    /// A vLLM engine.
    #[serde(rename = "vLLM")]
    Vllm,
    /// An SGLang engine.
    #[serde(rename = "SGLang")]
    Sglang,
    /// A Mooncake store.
    Mooncake,
}

impl Publisher {
    fn of(word: &str) -> Option<Self> {
        let known = [("vllm", Self::Vllm), ("sglang", Self::Sglang), ("mooncake", Self::Mooncake)];
        known.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(word)).map(|(_, publisher)| publisher)
    }
}

/// A publisher to follow, as `/register` and the configuration file name it; written under the same names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Registration {
    /// Where it publishes, `tcp://HOST:PORT`.
    pub endpoint: String,
    /// The endpoint that repeats published events.
    pub replay_endpoint: Option<String>,
    /// The kind of publisher.
    #[serde(rename = "type")]
    pub publisher: Publisher,
    /// The model.
    #[serde(rename = "modelname")]
    pub model: String,
    /// The adapter of blocks that name none; empty for the base model.
    #[serde(rename = "lora_name")]
    pub lora: String,
    /// The cache's tenant.
    #[serde(rename = "tenant_id")]
    pub tenant: String,
    /// Where routers send requests that should find these blocks.
    #[serde(rename = "instance_id")]
    pub instance: String,
    /// Tokens of a block.
    #[serde(rename = "block_size")]
    pub block_tokens: u32,
    /// Rank in a data-parallel group.
    pub dp_rank: u32,
    /// The salt that further separates its blocks from others'.
    #[serde(rename = "additionalsalt")]
    pub salt: String,
}

impl Registration {
    /// The name of the subscription, `instance|tenant|rank`: there is one at a time.
    #[must_use]
    pub fn key(&self) -> String {
        key(&self.instance, &self.tenant, self.dp_rank)
    }

    /// Reads a JSON object; also gives the fields that nobody knows.
    ///
    /// # Errors
    /// Names the field that is missing or wrong.
    pub fn parse(json: &[u8]) -> Result<(Self, Vec<String>), IndexerError> {
        Self::parse_named(json, None)
    }

    /// Like `parse`, for an object that may lack the instance's name; `instance` is the name then.
    pub(crate) fn parse_named(
        json: &[u8],
        instance: Option<&str>,
    ) -> Result<(Self, Vec<String>), IndexerError> {
        let mut fields = Fields::of(json)?;
        let endpoint = fields.address("endpoint")?.ok_or_else(|| missing("endpoint"))?;
        let word: String = fields.needed("type")?;
        let publisher = Publisher::of(&word)
            .ok_or_else(|| wrong("type", &format!("is '{word}'; say vLLM, SGLang or Mooncake")))?;
        let named = fields.name("instance_id")?.or_else(|| instance.map(str::to_owned));
        let registration = Self {
            endpoint,
            replay_endpoint: fields.address("replay_endpoint")?,
            publisher,
            model: fields.name("modelname")?.ok_or_else(|| missing("modelname"))?,
            lora: fields.lora()?,
            tenant: fields.part("tenant_id")?.unwrap_or_else(|| TENANT.into()),
            instance: part("instance_id", named)?.ok_or_else(|| missing("instance_id"))?,
            block_tokens: fields.block_tokens()?,
            dp_rank: fields.needed("dp_rank")?,
            salt: fields.name("additionalsalt")?.unwrap_or_default(),
        };
        Ok((registration, fields.unknown()))
    }
}

/// The name of a subscription.
fn key(instance: &str, tenant: &str, dp_rank: u32) -> String {
    format!("{instance}|{tenant}|{dp_rank}")
}

/// Reads what `/unregister` is sent: the subscription's name, and the fields that nobody knows.
pub(crate) fn parse_leaving(json: &[u8]) -> Result<(String, Vec<String>), IndexerError> {
    let mut fields = Fields::of(json)?;
    let instance = fields.part("instance_id")?.ok_or_else(|| missing("instance_id"))?;
    let tenant = fields.part("tenant_id")?.unwrap_or_else(|| TENANT.into());
    let dp_rank = fields.needed("dp_rank")?;
    // The rest says nothing that the name does not say.
    for field in ["type", "modelname", "lora_name", "lora_id", "block_size", "additionalsalt"] {
        fields.taken(field);
    }
    Ok((key(&instance, &tenant, dp_rank), fields.unknown()))
}

/// A query: which instances hold blocks of this context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// The context of the blocks.
    pub context: Context,
    /// Only of this instance.
    pub instance: Option<String>,
}

impl Lookup {
    fn take(fields: &mut Fields<'_>) -> Result<Self, IndexerError> {
        let context = Context {
            tenant: fields.part("tenant_id")?.unwrap_or_else(|| TENANT.into()),
            model: match fields.name("model")? {
                Some(model) => model,
                // Registrations use this name for the field, and some routers use it everywhere.
                None => fields.name("modelname")?.ok_or_else(|| missing("model"))?,
            },
            lora: fields.lora()?,
            block_tokens: fields.block_tokens()?,
            salt: fields.name("cache_salt")?.unwrap_or_default(),
        };
        Ok(Self { context, instance: fields.name("instance_id")? })
    }

    /// Reads what `/query` is sent: the prompt's tokens, and the fields that nobody knows.
    ///
    /// # Errors
    /// Names the field that is missing or wrong.
    pub fn by_tokens(json: &[u8]) -> Result<(Self, Vec<u32>, Vec<String>), IndexerError> {
        let mut fields = Fields::of(json)?;
        let lookup = Self::take(&mut fields)?;
        let tokens = fields.needed("token_ids")?;
        Ok((lookup, tokens, fields.unknown()))
    }

    /// Reads what `/query_by_hash` is sent: the blocks' names, low 64 bits, and the fields that nobody knows.
    ///
    /// # Errors
    /// Names the field that is missing or wrong.
    pub fn by_hashes(json: &[u8]) -> Result<(Self, Vec<u64>, Vec<String>), IndexerError> {
        let mut fields = Fields::of(json)?;
        let lookup = Self::take(&mut fields)?;
        let (newer, older): (Option<Vec<Word>>, Option<Vec<Word>>) =
            (fields.optional("seq_hashes")?, fields.optional("block_hash")?);
        let words = match (newer, older) {
            (Some(_), Some(_)) => return Err(wrong("block_hash", "is given beside seq_hashes; send one")),
            (Some(words), None) | (None, Some(words)) => words,
            (None, None) => return Err(missing("seq_hashes")),
        };
        let hashes = words.iter().enumerate().map(|(at, word)| {
            let text = "is no hash; send a 64-bit integer, or a digest in hex";
            word.low64().ok_or_else(|| wrong(&format!("seq_hashes[{at}]"), text))
        });
        Ok((lookup, hashes.collect::<Result<_, _>>()?, fields.unknown()))
    }
}

/// A hash as callers write it.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Word {
    Unsigned(u64),
    Signed(i64),
    Text(String),
}

impl Word {
    fn low64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(word) => Some(*word),
            Self::Signed(word) => Some(word.cast_unsigned()),
            Self::Text(text) => {
                if let Ok(word) = text.parse() {
                    return Some(word);
                }
                let hex = text.trim_start_matches("0x");
                let fits = !hex.is_empty() && hex.len() <= 64 && hex.bytes().all(|b| b.is_ascii_hexdigit());
                let low = hex.get(hex.len().saturating_sub(16)..)?;
                fits.then(|| u64::from_str_radix(low, 16).ok())?
            }
        }
    }
}

fn missing(field: &str) -> IndexerError {
    IndexerError::invalid(format!("field '{field}' is missing; it is required"))
}

fn wrong(field: &str, what: &str) -> IndexerError {
    IndexerError::invalid(format!("field '{field}' {what}"))
}

fn part(field: &str, name: Option<String>) -> Result<Option<String>, IndexerError> {
    match name {
        Some(name) if name.contains('|') => Err(wrong(
            field,
            "contains '|', which separates the parts of a subscription's name; leave it out",
        )),
        name => Ok(name),
    }
}

/// The fields of one object that were not read yet.
struct Fields<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> Fields<'a> {
    fn of(json: &'a [u8]) -> Result<Self, IndexerError> {
        let fields = serde_json::from_slice(json);
        fields.map(Self).map_err(|e| IndexerError::invalid(format!("the body is no JSON object: {e}")))
    }

    fn taken(&mut self, field: &str) {
        self.0.remove(field);
    }

    /// `null` says as much as leaving the field out.
    fn optional<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, IndexerError> {
        let Some(raw) = self.0.remove(field).filter(|raw| raw.get() != "null") else { return Ok(None) };
        let read = serde_json::from_str(raw.get());
        read.map(Some).map_err(|e| wrong(field, &format!("cannot be read: {e}")))
    }

    fn needed<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, IndexerError> {
        self.optional(field)?.ok_or_else(|| missing(field))
    }

    /// A name; an empty one says as much as none.
    fn name(&mut self, field: &str) -> Result<Option<String>, IndexerError> {
        let name = self.optional::<String>(field)?.filter(|name| !name.is_empty());
        if name.as_ref().is_some_and(|name| name.len() > NAME_BYTES_MAX) {
            return Err(wrong(field, &format!("has more than {NAME_BYTES_MAX} bytes; shorten it")));
        }
        Ok(name)
    }

    /// A name that is a part of a subscription's.
    fn part(&mut self, field: &str) -> Result<Option<String>, IndexerError> {
        let name = self.name(field)?;
        part(field, name)
    }

    fn address(&mut self, field: &str) -> Result<Option<String>, IndexerError> {
        let address = self.name(field)?;
        let whole = |address: &str| {
            let rest = address.strip_prefix("tcp://");
            rest.and_then(|rest| rest.rsplit_once(':')).is_some_and(|(host, port)| {
                !host.is_empty() && host != "*" && port.parse().is_ok_and(|port: u16| port > 0)
            })
        };
        match address {
            Some(address) if !whole(&address) => {
                Err(wrong(field, &format!("is '{address}'; say tcp://HOST:PORT as it is reached from here")))
            }
            address => Ok(address),
        }
    }

    fn lora(&mut self) -> Result<String, IndexerError> {
        let (name, id): (Option<String>, Option<i64>) = (self.name("lora_name")?, self.optional("lora_id")?);
        match (name, id.filter(|id| *id > 0)) {
            (Some(_), Some(_)) => Err(wrong("lora_id", "is given beside lora_name; send lora_name alone")),
            (Some(name), None) => Ok(name),
            (None, id) => Ok(id.map_or_else(String::new, |id| id.to_string())),
        }
    }

    fn block_tokens(&mut self) -> Result<u32, IndexerError> {
        let tokens = self.needed("block_size")?;
        let range = || format!("is {tokens}; blocks have 1 to {BLOCK_TOKENS_MAX} tokens");
        if (1..=BLOCK_TOKENS_MAX).contains(&tokens) { Ok(tokens) } else { Err(wrong("block_size", &range())) }
    }

    fn unknown(self) -> Vec<String> {
        self.0.into_keys().take(16).map(|name| name.chars().take(64).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"{"endpoint":"tcp://10.0.0.1:5557","type":"vLLM","modelname":"m","instance_id":"i",
        "block_size":16,"dp_rank":0"#;

    fn refused(json: &str) -> String {
        Registration::parse(json.as_bytes()).unwrap_err().message
    }

    #[test]
    fn a_registration_has_its_defaults_and_its_unknown_fields() {
        let json = format!(r#"{WHOLE},"color":1,"tenant_id":null,"replay_endpoint":""}}"#);
        let (registration, unknown) = Registration::parse(json.as_bytes()).unwrap();
        assert_eq!(registration.key(), "i|default|0");
        assert_eq!((registration.replay_endpoint.as_deref(), registration.salt.as_str()), (None, ""));
        assert_eq!(unknown, ["color"]);
        let written = serde_json::to_vec(&registration).unwrap();
        assert_eq!(Registration::parse(&written).unwrap(), (registration, vec![]));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for field in ["endpoint", "type", "modelname", "instance_id", "block_size", "dp_rank"] {
            let without = format!("{WHOLE}}}").replace(&format!("\"{field}\""), "\"other\"");
            assert_eq!(refused(&without), format!("field '{field}' is missing; it is required"));
        }
        for (from, to, field) in [
            ("tcp://10.0.0.1:5557", "10.0.0.1:5557", "endpoint"),
            ("tcp://10.0.0.1:5557", "tcp://*:5557", "endpoint"),
            ("vLLM", "TensorRT", "type"),
            (":16", ":0", "block_size"),
            (":16", ":\"16\"", "block_size"),
            (":0", ":-1", "dp_rank"),
            ("\"i\"", "\"i|j\"", "instance_id"),
        ] {
            let message = refused(&format!("{WHOLE}}}").replace(from, to));
            assert!(message.starts_with(&format!("field '{field}'")), "{message}");
        }
        assert!(refused("[1]").starts_with("the body is no JSON object"));
        assert!(refused(&format!("{WHOLE},\"lora_name\":\"a\",\"lora_id\":2}}")).contains("lora_id"));
    }

    #[test]
    fn hashes_come_as_integers_of_either_sign_or_in_hex() {
        let json = br#"{"model":"m","block_size":4,"block_hash":[1,-1,"18446744073709551615","0xff",
            "00000000000000000000000000000000000000000000000000000000000000aa"]}"#;
        let (_, hashes, _) = Lookup::by_hashes(json).unwrap();
        assert_eq!(hashes, [1, u64::MAX, u64::MAX, 255, 0xaa]);
        for bad in ["\"xyz\"", "\"\"", "\"é\""] {
            let json = format!(r#"{{"model":"m","block_size":4,"seq_hashes":[1,{bad}]}}"#);
            let error = Lookup::by_hashes(json.as_bytes()).unwrap_err();
            assert!(error.message.starts_with("field 'seq_hashes[1]'"), "{error}");
        }
    }

    #[test]
    fn a_query_names_its_context() {
        let json = br#"{"model":"m","lora_id":3,"token_ids":[1,2],"block_size":2,"cache_salt":"s","x":{}}"#;
        let (lookup, tokens, unknown) = Lookup::by_tokens(json).unwrap();
        assert_eq!((lookup.context.lora.as_str(), lookup.context.salt.as_str()), ("3", "s"));
        assert_eq!((tokens, unknown), (vec![1, 2], vec!["x".to_owned()]));
        let error = Lookup::by_tokens(br#"{"model":"m","block_size":2,"token_ids":[1,-2]}"#).unwrap_err();
        assert!(error.message.starts_with("field 'token_ids'"), "{error}");
    }
}
