//! The metadata of an engine's segment: where its bytes are served, and which ranges of addresses it owns.

use serde_json::{Value, json};

use crate::error::{MooncakeError, Result};

/// The version of the data protocol that is spoken here.
pub const PROTOCOL_VERSION: u64 = 2;
/// The stage in error texts.
const STAGE: &str = "segment metadata";

/// One range of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where the memory is, in the owner's words: `cpu:0`.
    pub name: String,
    /// First address.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// A segment that is served over TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentMeta {
    /// Its name: HOST:PORT of the handshake where there is no metadata server.
    pub name: String,
    /// Where its bytes are served, where that is not the host of its name.
    pub data_host: Option<String>,
    /// The port at which they are served.
    pub data_port: u16,
    /// When it was written down, in its owner's words.
    pub timestamp: String,
    /// Its ranges.
    pub buffers: Vec<Buffer>,
}

impl SegmentMeta {
    /// Reads what an engine says.
    ///
    /// # Errors
    /// When it says too little, its bytes are not served over TCP, or only by the first version of the protocol, whose
    /// losses are silent.
    pub fn parse(json: Value) -> Result<Self> {
        let text = |field: &str| json[field].as_str().map(str::to_owned);
        let name = text("name").ok_or_else(|| lacks("name"))?;
        if json["protocol"] != "tcp" {
            let message =
                format!("segment {name} is served over {}, only tcp is spoken here", json["protocol"]);
            return Err(MooncakeError::invalid(STAGE, message));
        }
        match json["tcp_proto_version"].as_u64() {
            Some(version) if version >= PROTOCOL_VERSION => {}
            version => {
                let message = format!(
                    "segment {name} is served by version {} of the data protocol, whose losses are silent: it is refused; \
                     run an engine that has version {PROTOCOL_VERSION}",
                    version.unwrap_or(1)
                );
                return Err(MooncakeError::invalid(STAGE, message));
            }
        }
        let port = json["tcp_data_port"].as_u64().and_then(|port| u16::try_from(port).ok());
        let buffers = json["buffers"].as_array().ok_or_else(|| lacks("buffers"))?;
        Ok(Self {
            data_host: text("tcp_data_host").filter(|host| !host.is_empty()),
            data_port: port.filter(|port| *port > 0).ok_or_else(|| lacks("tcp_data_port"))?,
            timestamp: text("timestamp").unwrap_or_default(),
            buffers: buffers.iter().map(buffer).collect::<Result<_>>()?,
            name,
        })
    }

    /// The metadata as an engine would send it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let buffers: Vec<Value> = self
            .buffers
            .iter()
            .map(|one| json!({ "name": one.name, "addr": one.address, "length": one.bytes }))
            .collect();
        let mut said = json!({
            "name": self.name,
            "protocol": "tcp",
            "tcp_data_port": self.data_port,
            "tcp_proto_version": PROTOCOL_VERSION,
            "timestamp": self.timestamp,
            "buffers": buffers,
        });
        if let Some(host) = &self.data_host {
            said["tcp_data_host"] = json!(host);
        }
        said
    }

    /// Where its bytes are served, HOST:PORT, given the host that its name stands for.
    #[must_use]
    pub fn data_address(&self, host: &str) -> String {
        format!("{}:{}", self.data_host.as_deref().unwrap_or(host), self.data_port)
    }

    /// Whether all of a range lies in one of its own.
    #[must_use]
    pub fn holds(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let inside = |one: &Buffer| {
            one.address <= address && one.address.checked_add(one.bytes).is_some_and(|last| end <= last)
        };
        self.buffers.iter().any(inside)
    }
}

fn buffer(json: &Value) -> Result<Buffer> {
    let number = |field: &str| json[field].as_u64().ok_or_else(|| lacks(field));
    let name = json["name"].as_str().unwrap_or_default().to_owned();
    Ok(Buffer { name, address: number("addr")?, bytes: number("length")? })
}

fn lacks(field: &str) -> MooncakeError {
    MooncakeError::corrupt(STAGE, format!("there is no usable '{field}' in it; is this an engine with tcp?"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The response of a real engine of 0.3.13.post1 to a handshake on 21 November 2026.
    #[test]
    fn a_real_engines_segment_is_read() {
        let said: Value = serde_json::from_str(include_str!("../testdata/engine.json")).unwrap();
        let meta = SegmentMeta::parse(said.clone()).unwrap();
        assert_eq!(meta.data_address("elsewhere"), "127.0.0.1:15504");
        assert!(meta.holds(139_793_400_852_496, 1 << 31) && !meta.holds(139_793_400_852_496, (1 << 31) + 1));
        let mut ours = meta.to_json();
        // Ours has no network card to name.
        ours["rdma_server_name"] = json!("");
        assert_eq!(ours, said);
    }

    const FIELDS: &[&str] =
        &["name", "protocol", "tcp_data_port", "tcp_proto_version", "buffers", "addr", "length"];

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            "tcp|rdma|[a-z]{0,4}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 40, 8, |inner| {
            let field = prop::sample::select(FIELDS).prop_map(str::to_owned);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(field, inner, 0..8)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_json_is_read_or_refused(json in any_json()) {
            if let Ok(meta) = SegmentMeta::parse(json) {
                prop_assert_eq!(SegmentMeta::parse(meta.to_json()).unwrap(), meta);
            }
        }

        #[test]
        fn what_is_said_is_read(port in 1u16.., buffers in prop::collection::vec((any::<u64>(), any::<u64>()), 0..4)) {
            let buffers = buffers.into_iter().map(|(address, bytes)| Buffer { name: "b".into(), address, bytes });
            let meta = SegmentMeta {
                name: "a:1".into(),
                data_host: None,
                data_port: port,
                timestamp: "now".into(),
                buffers: buffers.collect(),
            };
            prop_assert_eq!(SegmentMeta::parse(meta.to_json()).unwrap(), meta);
        }
    }
}
