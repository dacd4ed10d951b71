//! The configuration file of Mooncake's conductor: publishers to follow from the start.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::contract::Registration;
use crate::error::IndexerError;

/// The content of a `conductor_config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FixedConfig {
    /// The port to serve on, where the file names one.
    pub port: Option<u16>,
    /// The publishers.
    pub registrations: Vec<Registration>,
    /// Fields that nobody knows, each as `entry.field`.
    pub unknown: Vec<String>,
}

#[derive(Deserialize)]
struct File {
    http_server_port: Option<u16>,
    #[serde(default)]
    kvevent_instance: BTreeMap<String, Box<RawValue>>,
}

/// Reads a configuration: `{"http_server_port", "kvevent_instance": {NAME: registration}}`, where a registration
/// without `instance_id` is called by its name.
///
/// # Errors
/// Names the entry and the field that is missing or wrong.
pub fn read_config(json: &[u8]) -> Result<FixedConfig, IndexerError> {
    let file: File =
        serde_json::from_slice(json).map_err(|e| IndexerError::invalid(format!("configuration: {e}")))?;
    let mut fixed =
        FixedConfig { port: file.http_server_port, registrations: Vec::new(), unknown: Vec::new() };
    for (name, raw) in file.kvevent_instance {
        let (registration, unknown) = Registration::parse_named(raw.get().as_bytes(), Some(&name))
            .map_err(|e| IndexerError::invalid(format!("configuration: kvevent_instance.{name}: {e}")))?;
        fixed.registrations.push(registration);
        fixed.unknown.extend(unknown.into_iter().map(|field| format!("{name}.{field}")));
    }
    Ok(fixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_registrations_and_errors_name_them() {
        let entry = r#"{"endpoint":"tcp://127.0.0.1:5557","type":"Mooncake","modelname":"m","block_size":16,
            "dp_rank":2,"cache_group":0}"#;
        let json = format!(r#"{{"http_server_port":14444,"kvevent_instance":{{"pool":{entry}}}}}"#);
        let fixed = read_config(json.as_bytes()).unwrap();
        assert_eq!((fixed.port, fixed.registrations[0].key()), (Some(14444), "pool|default|2".to_owned()));
        assert_eq!(fixed.unknown, ["pool.cache_group"]);
        let error = read_config(json.replace("modelname", "model").as_bytes()).unwrap_err();
        let expected = "configuration: kvevent_instance.pool: field 'modelname' is missing; it is required";
        assert_eq!(error.message, expected);
        assert!(read_config(b"{").is_err());
    }
}
