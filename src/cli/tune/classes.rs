//! Service classes on the command line: `interactive=2s/50ms@99%`.

use std::str::FromStr;

use anyhow::{Context as _, Error, Result, bail};
use baton_traces::Trace;
use baton_types::SloClass;

use crate::config::{self, Config};

/// A class with its objectives.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassObjective {
    name: String,
    ttft_us: u64,
    tbt_us: u64,
    target_permille: Option<u32>,
}

impl FromStr for ClassObjective {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = "give NAME=TTFT/TBT@SHARE, such as interactive=2s/50ms@99%";
        let (name, rest) = text.split_once('=').context(wrong)?;
        let (times, share) = rest.split_once('@').map_or((rest, None), |(times, share)| (times, Some(share)));
        let (ttft, tbt) = times.split_once('/').context(wrong)?;
        let quoted = |text: &str| toml::Value::String(text.trim().to_owned()).to_string();
        let mut file = format!(
            "[[scheduler.classes]]\nname = {}\nttft = {}\ntbt = {}\n",
            quoted(name),
            quoted(ttft),
            quoted(tbt)
        );
        if let Some(share) = share {
            let plain = share.trim().parse::<f64>().is_ok();
            let percent = if plain { share.trim().to_owned() } else { quoted(share) };
            file.push_str(&format!("target = {percent}\n"));
        }
        // As in a file: the same units, the same bounds.
        let read = config::parse(&file).map_err(|error| {
            let error = error.to_string();
            let why = error.split_once("TOML line ").and_then(|(_, rest)| rest.split_once(", "));
            Error::msg(why.map_or(error.as_str(), |(_, why)| why).to_owned())
        })?;
        let class = &read.scheduler.classes[0];
        let target_permille = share.map(|_| class.target_permille);
        Ok(Self { name: class.name.clone(), ttft_us: class.ttft_us, tbt_us: class.tbt_us, target_permille })
    }
}

/// Gives a configuration these classes, if there are any. One that it has by name keeps its other settings.
pub fn apply(asked: &[ClassObjective], config: &mut Config) {
    let known = std::mem::take(&mut config.scheduler.classes);
    let merged = |class: &ClassObjective| {
        let before = known.iter().find(|known| known.name == class.name).cloned().unwrap_or_default();
        SloClass {
            name: class.name.clone(),
            ttft_us: class.ttft_us,
            tbt_us: class.tbt_us,
            target_permille: class.target_permille.unwrap_or(before.target_permille),
            ..before
        }
    };
    let classes: Vec<SloClass> = asked.iter().map(merged).collect();
    config.scheduler.classes = if classes.is_empty() { known } else { classes };
}

/// Whether the rows and the classes are of each other.
///
/// # Errors
/// A class that only one of the two has.
pub fn check(trace: &Trace, classes: &[SloClass]) -> Result<()> {
    let there = || classes.iter().map(|class| class.name.as_str()).collect::<Vec<_>>().join(", ");
    let mut rows = vec![0; classes.len()];
    for record in &trace.records {
        let named = record.extra.as_ref().and_then(|extra| extra.class.as_ref());
        let at = named.map_or(Some(0), |name| classes.iter().position(|class| class.name == *name));
        match (at, named) {
            (Some(at), _) => rows[at] += 1,
            (None, name) => {
                let name = name.map_or("", String::as_str);
                bail!(
                    "tune: rows of the trace are of class {name}, and there is none of that name (there are: {}); \
                     give --class {name}=TTFT/TBT@SHARE",
                    there()
                );
            }
        }
    }
    match rows.iter().position(|rows| *rows == 0) {
        Some(at) => bail!(
            "tune: no row of the trace is of class {}; leave that class out, or name it in the rows' field \"class\"",
            classes[at].name
        ),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_read_with_its_units() {
        let class: ClassObjective = "interactive=2s/50ms@99%".parse().expect("a class");
        assert_eq!((class.ttft_us, class.tbt_us, class.target_permille), (2_000_000, 50_000, Some(990)));
        let class: ClassObjective = "batch=1m/200ms".parse().expect("a class");
        assert_eq!((class.name.as_str(), class.ttft_us, class.target_permille), ("batch", 60_000_000, None));
        assert_eq!("a=1s/1ms@0.95".parse::<ClassObjective>().unwrap().target_permille, Some(950));
    }

    #[test]
    fn a_class_that_is_none_is_refused_with_what_to_give() {
        for (text, why) in [
            ("interactive", "NAME=TTFT/TBT@SHARE"),
            ("interactive=2s", "NAME=TTFT/TBT@SHARE"),
            ("interactive=2/50ms@99%", "ttft: give a time with its unit"),
            ("interactive=2s/50@99%", "tbt: give a time with its unit"),
            ("interactive=2s/50ms@99", "target"),
            ("interactive=2s/50ms@1000%", "target"),
            ("interactive=2s/50ms@lots", "target"),
        ] {
            let error = text.parse::<ClassObjective>().expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_class_that_the_configuration_has_keeps_its_other_settings() {
        let text = "[[scheduler.classes]]\nname = \"a\"\npriority = 3\n[[scheduler.classes]]\nname = \"b\"\n";
        let mut config = config::parse(text).expect("valid");
        apply(&[], &mut config);
        assert_eq!(config.scheduler.classes.len(), 2);
        apply(&["a=1s/60ms".parse().expect("a class")], &mut config);
        let [class] = &config.scheduler.classes[..] else { panic!("one class was asked for") };
        assert_eq!((class.priority, class.ttft_us, class.target_permille), (3, 1_000_000, 995));
    }
}
