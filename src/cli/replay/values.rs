//! Values of `baton replay`'s options as people write them.

use anyhow::{Context as _, Result, bail};
use baton_scheduler::{AdmissionMode, PolicyName};
use baton_types::nearest;

use crate::config;

pub(in crate::cli) fn policy(text: &str) -> Result<PolicyName> {
    if let Some(error) = config::renamed(text) {
        bail!(error);
    }
    let names = || PolicyName::ALL.iter().map(|p| p.name());
    PolicyName::ALL.into_iter().find(|p| p.name() == text).with_context(|| unknown(text, names()))
}

pub(in crate::cli) fn admission(text: &str) -> Result<AdmissionMode> {
    use AdmissionMode::{AtDecode, Auto, Early, EarlyPredict, None, Slo};
    let all = [Auto, None, AtDecode, Early, EarlyPredict, Slo];
    all.into_iter().find(|m| m.name() == text).with_context(|| unknown(text, all.iter().map(|m| m.name())))
}

fn unknown<'a>(text: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let meant = nearest(text, known.clone()).map(|k| format!("did you mean {k}? ")).unwrap_or_default();
    format!("{meant}known: {}", known.collect::<Vec<_>>().join(", "))
}

pub(in crate::cli) fn speed(text: &str) -> Result<f64> {
    match text.parse::<f64>() {
        Ok(speed) if speed.is_finite() && (0.001..=1000.0).contains(&speed) => Ok(speed),
        _ => bail!("give a factor from 0.001 to 1000"),
    }
}

pub(in crate::cli) fn at_least_one(text: &str) -> Result<usize> {
    text.parse().ok().filter(|count| *count > 0).context("give a whole number from 1")
}

/// A stretch of a trace: given in seconds, returned in milliseconds.
pub(in crate::cli) fn window(text: &str) -> Result<(f64, f64)> {
    let (from, to) = text.split_once("..").context("give two times in seconds, like 600..1200")?;
    match (from.parse::<f64>(), to.parse::<f64>()) {
        (Ok(from), Ok(to)) if from >= 0.0 && from < to && to.is_finite() => Ok((from * 1e3, to * 1e3)),
        _ => bail!("give a start of at least 0 and a later end, like 600..1200"),
    }
}
