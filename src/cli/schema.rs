//! The JSON schema of the configuration file, for editors, derived from the settings themselves.

use anyhow::Result;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use crate::config::Config;

/// The schema as JSON text.
pub fn text() -> Result<String> {
    let mut schema = schema()?;
    add_short_names(&mut schema);
    Ok(serde_json::to_string_pretty(&schema)? + "\n")
}

/// Adds the names under which settings are given with their units.
fn add_short_names(schema: &mut Value) {
    if let Some(settings) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        let short = |name: &String| {
            let (short, what) = crate::config::short(name)?;
            let meaning = json!({"description": format!("`{name}`: {what}."), "type": ["string", "number"]});
            Some((short.to_owned(), meaning))
        };
        let more: Vec<(String, Value)> = settings.keys().filter_map(short).collect();
        settings.extend(more);
    }
    match schema {
        Value::Object(fields) => fields.values_mut().for_each(add_short_names),
        Value::Array(list) => list.iter_mut().for_each(add_short_names),
        _ => {}
    }
}

/// The schema, every section written where it is used.
pub fn schema() -> Result<Value> {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut root = settings.into_generator().into_root_schema_for::<Config>().to_value();
    let defaults = serde_json::to_value(Config::default())?;
    set_defaults(&mut root, &defaults);
    Ok(root)
}

/// Gives each setting the default that the file has, which may differ from its section's own: blocks have 512 tokens
/// in a simulation and 16 in the file.
fn set_defaults(schema: &mut Value, default: &Value) {
    let (Some(settings), true) = (default.as_object(), schema["properties"].is_object()) else {
        schema["default"] = default.clone();
        return;
    };
    if let Some(section) = schema.as_object_mut() {
        section.remove("default");
    }
    for (name, default) in settings {
        set_defaults(&mut schema["properties"][name], default);
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference;
    use super::*;

    fn parsed() -> Value {
        serde_json::from_str(&text().expect("a schema")).expect("JSON")
    }

    /// The words that a setting takes.
    fn words(setting: &Value) -> Vec<&Value> {
        setting["oneOf"].as_array().into_iter().flatten().map(|word| &word["const"]).collect()
    }

    /// Checks a value against the few words of the schema language that are used here.
    fn fits(schema: &Value, value: &Value, path: &str) {
        let words = words(schema);
        assert!(words.is_empty() || words.contains(&value), "{path} = {value} is none of {words:?}");
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
            other => assert!(other.is_none() && !words.is_empty(), "{path} has no type"),
        }
    }

    #[test]
    fn the_defaults_fit_their_schema() {
        let value = serde_json::to_value(Config::default()).expect("a config is JSON");
        fits(&parsed(), &value, "config");
    }

    #[test]
    fn a_client_key_needs_two_of_its_settings() {
        let keys = &parsed()["properties"]["service"]["properties"]["api_keys"];
        assert_eq!(keys["items"]["required"], json!(["key", "tenant"]));
        fits(keys, &json!([{"key": "k", "tenant": "t"}]), "api_keys");
        fits(keys, &json!([{"key": "k", "tenant": "t", "classes": ["default"]}]), "api_keys");
        let parse = |rest: &str| crate::config::parse(&format!("[[service.api_keys]]\nkey = \"k\"\n{rest}"));
        assert!(parse("").is_err() && parse("tenant = \"t\"").is_ok(), "as the parser has it");
        assert!(parse("tenant = \"t\"\nclasses = [\"default\"]").is_ok());
    }

    #[test]
    fn every_word_of_the_schema_is_taken_by_the_parser_and_described() {
        let schema = parsed();
        let scheduler = &schema["properties"]["scheduler"]["properties"];
        assert_eq!(words(&scheduler["policy"]).len(), baton_scheduler::PolicyName::ALL.len());
        assert_eq!(words(&scheduler["shadow"]["items"]).len(), 6);
        let mut tried = 0;
        for section in reference::sections().expect("sections") {
            for setting in section.settings {
                for (word, meaning) in &setting.words {
                    let file = format!("{}\n{} = \"{word}\"\n", section.heading, setting.name);
                    let read: Result<Config, _> = toml::from_str(&file);
                    assert!(read.is_ok() && meaning.ends_with('.'), "{file}: {meaning}: {read:?}");
                    tried += 1;
                }
            }
        }
        assert!(tried >= 38, "{tried} words");
    }

    #[test]
    fn defaults_are_those_of_the_file() {
        let schema = parsed();
        let tokens = &schema["properties"]["scheduler"]["properties"]["block_tokens"];
        assert_eq!((&tokens["default"], &tokens["minimum"]), (&json!(16), &json!(0)));
        assert!(schema["properties"]["scheduler"]["default"].is_null(), "its settings have theirs");
    }

    #[test]
    fn numbers_below_zero_are_excluded_where_the_parser_excludes_them() {
        let schema = parsed();
        let classes = &schema["properties"]["scheduler"]["properties"]["classes"]["items"]["properties"];
        assert!(classes["priority"]["minimum"].is_null(), "a band may be below zero");
        assert_eq!(classes["weight"]["minimum"], 0);
        assert_eq!(classes["ttft"]["type"], json!(["string", "number"]), "with its unit");
        assert_eq!(schema["additionalProperties"], false);
    }
}
