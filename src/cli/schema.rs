//! The JSON schema of the configuration file, for editors: types and words come from the settings
//! themselves, texts from the comments beside them.

use serde_json::{Map, Value, json};

use super::reference::{SECTIONS, Section, Setting, default_of, fields};
use crate::config::Config;

/// The schema as JSON text.
pub fn text() -> Result<String, String> {
    let defaults = toml::Value::try_from(Config::default()).map_err(|e| e.to_string())?;
    let mut root = object("Baton's configuration file: one TOML file, all of it optional.");
    root["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    for section in &SECTIONS {
        let table = table(section, &defaults);
        place(&mut root, section, table)?;
    }
    serde_json::to_string_pretty(&root).map(|text| text + "\n").map_err(|e| e.to_string())
}

fn object(description: &str) -> Value {
    json!({ "description": description, "type": "object", "additionalProperties": false, "properties": {} })
}

/// One section's settings; those that are sections of their own come later.
fn table(section: &Section, defaults: &toml::Value) -> Value {
    let (mut table, mut needed) = (object(section.heading), Vec::new());
    for Setting { name, meaning, optional } in fields(section.source, section.name) {
        let Some(default) = default_of(defaults, section, &name) else {
            // Of entries that no default has: what is needed so far are strings, what is not are lists of them.
            table["properties"][&name] = if optional {
                json!({ "description": meaning, "type": "array", "items": { "type": "string" } })
            } else {
                json!({ "description": meaning, "type": "string" })
            };
            needed.extend((!optional).then_some(name));
            continue;
        };
        if nested(default) {
            continue;
        }
        let mut setting = Map::new();
        setting.insert("description".into(), meaning.into());
        setting.insert("default".into(), serde_json::to_value(default).unwrap_or_default());
        kind(section, &name, default, &mut setting);
        table["properties"][name] = Value::Object(setting);
    }
    if !needed.is_empty() {
        table["required"] = json!(needed);
    }
    table
}

fn nested(value: &toml::Value) -> bool {
    let list = value.as_array().and_then(|list| list.first());
    value.is_table() || list.is_some_and(toml::Value::is_table)
}

/// Type and bounds of a setting, found out by offering values to the real parser.
fn kind(section: &Section, name: &str, default: &toml::Value, setting: &mut Map<String, Value>) {
    let mut say = |key: &str, value: Value| setting.insert(key.into(), value);
    match default {
        toml::Value::Integer(_) => {
            say("type", json!("integer"));
            if offer(section, name, "-1").is_err() {
                say("minimum", json!(0));
            }
        }
        toml::Value::Float(_) => {
            say("type", json!("number"));
        }
        toml::Value::Boolean(_) => {
            say("type", json!("boolean"));
        }
        toml::Value::Array(_) => {
            say("type", json!("array"));
            say("items", json!({ "enum": words(section, name, "[\"?\"]") }));
        }
        _ => match words(section, name, "\"?\"") {
            words if words.is_empty() => {
                say("type", json!("string"));
            }
            words => {
                say("enum", json!(words));
            }
        },
    }
}

/// Parses a file in which only this setting is given.
fn offer(section: &Section, name: &str, value: &str) -> Result<Config, toml::de::Error> {
    toml::from_str(&format!("{}\n{name} = {value}\n", section.heading))
}

/// The words that a setting takes, from what the parser says to one that it does not know.
fn words(section: &Section, name: &str, value: &str) -> Vec<String> {
    let Err(error) = offer(section, name, value) else { return Vec::new() };
    error.message().split('`').skip(3).step_by(2).map(str::to_owned).collect()
}

/// Puts a section's table where the file has it.
fn place(root: &mut Value, section: &Section, table: Value) -> Result<(), String> {
    let (last, parents) = section.path.split_last().ok_or("a section without a name")?;
    let parent = parents.iter().fold(root, |at, key| &mut at["properties"][*key]);
    let list = section.heading.starts_with("[[");
    parent["properties"][*last] = if list { json!({ "type": "array", "items": table }) } else { table };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Value {
        serde_json::from_str(&text().expect("a schema")).expect("JSON")
    }

    /// Checks a value against the few words of the schema language that are used here.
    fn fits(schema: &Value, value: &Value, path: &str) {
        if let Some(words) = schema["enum"].as_array() {
            assert!(words.contains(value), "{path} = {value} is none of {words:?}");
        }
        match schema["type"].as_str() {
            Some("object") => {
                for (name, value) in value.as_object().expect(path) {
                    let of = schema["properties"].get(name);
                    fits(
                        of.unwrap_or_else(|| panic!("{path}.{name} is unknown")),
                        value,
                        &format!("{path}.{name}"),
                    );
                }
            }
            Some("array") => {
                value.as_array().expect(path).iter().for_each(|value| fits(&schema["items"], value, path));
            }
            Some("integer") => {
                assert!(value.is_i64() || value.is_u64(), "{path} = {value}");
                assert!(
                    schema["minimum"].is_null() || value.as_i64() >= schema["minimum"].as_i64(),
                    "{path}"
                );
            }
            Some("number") => assert!(value.is_number(), "{path} = {value}"),
            Some("boolean") => assert!(value.is_boolean(), "{path} = {value}"),
            Some("string") => assert!(value.is_string(), "{path} = {value}"),
            other => assert!(other.is_none() && schema["enum"].is_array(), "{path} has no type"),
        }
    }

    #[test]
    fn the_defaults_fit_their_schema() {
        let value = serde_json::to_value(Config::default()).expect("a config is JSON");
        fits(&schema(), &value, "config");
    }

    #[test]
    fn a_client_key_needs_two_of_its_settings() {
        let keys = &schema()["properties"]["service"]["properties"]["api_keys"];
        assert_eq!(keys["items"]["required"], json!(["key", "tenant"]));
        fits(keys, &json!([{"key": "k", "tenant": "t"}]), "api_keys");
        fits(keys, &json!([{"key": "k", "tenant": "t", "classes": ["default"]}]), "api_keys");
        let parse = |rest: &str| crate::config::parse(&format!("[[service.api_keys]]\nkey = \"k\"\n{rest}"));
        assert!(parse("").is_err() && parse("tenant = \"t\"").is_ok(), "as the parser has it");
        assert!(parse("tenant = \"t\"\nclasses = [\"default\"]").is_ok());
    }

    #[test]
    fn every_word_of_the_schema_is_taken_by_the_parser() {
        let schema = schema();
        let scheduler = &schema["properties"]["scheduler"]["properties"];
        let policies = scheduler["policy"]["enum"].as_array().expect("words");
        assert_eq!(policies.len(), baton_scheduler::PolicyName::ALL.len());
        for section in &SECTIONS {
            let Some((setting, described)) = super::super::reference::policies(section.heading) else {
                continue;
            };
            let described: Vec<&str> = described.into_iter().map(|(word, _)| word).collect();
            assert_eq!(words(section, setting, "\"?\""), described, "{setting}");
        }
        assert_eq!(scheduler["shadow"]["items"]["enum"].as_array().map(Vec::len), Some(6));
        for section in &SECTIONS {
            let at = section.path.iter().fold(&schema, |at, key| {
                let next = &at["properties"][*key];
                if next["items"].is_object() { &next["items"] } else { next }
            });
            for (name, setting) in at["properties"].as_object().expect("settings") {
                for word in setting["enum"].as_array().into_iter().flatten() {
                    assert!(offer(section, name, &word.to_string()).is_ok(), "{name} = {word}");
                }
            }
        }
    }

    #[test]
    fn numbers_below_zero_are_excluded_where_the_parser_excludes_them() {
        let schema = schema();
        let classes = &schema["properties"]["scheduler"]["properties"]["classes"]["items"]["properties"];
        assert!(classes["priority"]["minimum"].is_null(), "a band may be below zero");
        assert_eq!(classes["weight"]["minimum"], 0);
        assert_eq!(schema["additionalProperties"], false);
    }
}
