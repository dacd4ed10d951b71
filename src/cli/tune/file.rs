//! A configuration as a file that has only what differs from the defaults.

use anyhow::{Context as _, Result};
use baton_types::SloClass;
use serde::Serialize;
use toml::{Table, Value};

use crate::config::{Config, PoolConfig};

/// The sections that a tuned file has; the others say where a service runs, and hold secrets.
const SECTIONS: [&str; 6] = ["scheduler", "store", "cluster", "network", "clients", "faults"];

/// The text of the file, below `head` as a comment.
///
/// # Errors
/// The configuration cannot be written as TOML.
pub fn text(config: &Config, head: &str) -> Result<String> {
    let mut kept = Table::new();
    let (mut all, defaults) = (table(config)?, table(&Config::default())?);
    for section in SECTIONS {
        let Some(Value::Table(mut settings)) = all.remove(section) else { continue };
        let of_default = defaults.get(section).and_then(Value::as_table);
        settings.retain(|name, value| of_default.is_none_or(|table| table.get(name) != Some(value)));
        for (list, entry) in
            [("classes", table(&SloClass::default())?), ("pools", table(&PoolConfig::default())?)]
        {
            let entries = settings.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten();
            entries.filter_map(Value::as_table_mut).for_each(|one| {
                one.retain(|name, value| entry.get(name) != Some(value));
            });
        }
        if !settings.is_empty() {
            kept.insert(section.to_owned(), Value::Table(settings));
        }
    }
    let comment: String = head.lines().map(|line| format!("# {line}\n")).collect();
    Ok(comment + &toml::to_string(&kept).context("output")?)
}

fn table(of: &impl Serialize) -> Result<Table> {
    Table::try_from(of).context("output")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::nodes::RoleSplit;

    #[test]
    fn the_defaults_need_no_line_and_a_tuned_file_reads_back_as_it_was() {
        assert_eq!(text(&Config::default(), "one\ntwo").unwrap(), "# one\n# two\n");
        let mut config = crate::config::parse(
            "[scheduler]\nlocal_prefill = false\n[[scheduler.classes]]\nname = \"a\"\npriority = 1\n\
             [[scheduler.classes]]\nname = \"b\"\nttft = \"60s\"\n[clients]\nretries = 1\n",
        )
        .expect("valid");
        RoleSplit { prefills: 12, decodes: 4 }.apply(&mut config).expect("a ratio");
        let text = text(&config, "").expect("a file");
        assert_eq!(crate::config::parse(&text), Ok(config));
        assert!(
            !text.contains("net_gbps") && !text.contains("tbt_us") && text.lines().count() < 25,
            "{text}"
        );
    }
}
