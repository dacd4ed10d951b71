//! Values of `baton replay`'s options as people write them.

use baton_scheduler::{AdmissionMode, PolicyName};
use baton_types::nearest;

use crate::config;

pub(in crate::cli) fn policy(text: &str) -> Result<PolicyName, String> {
    if let Some(error) = config::renamed(text) {
        return Err(error);
    }
    let names = || PolicyName::ALL.iter().map(|p| p.name());
    PolicyName::ALL.into_iter().find(|p| p.name() == text).ok_or_else(|| unknown(text, names()))
}

pub(in crate::cli) fn admission(text: &str) -> Result<AdmissionMode, String> {
    use AdmissionMode::{AtDecode, Auto, Early, EarlyPredict, None, Slo};
    let all = [Auto, None, AtDecode, Early, EarlyPredict, Slo];
    all.into_iter().find(|m| m.name() == text).ok_or_else(|| unknown(text, all.iter().map(|m| m.name())))
}

fn unknown<'a>(text: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let meant = nearest(text, known.clone()).map(|k| format!("did you mean {k}? ")).unwrap_or_default();
    format!("{meant}known: {}", known.collect::<Vec<_>>().join(", "))
}

pub(in crate::cli) fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(speed) if speed.is_finite() && (0.001..=1000.0).contains(&speed) => Ok(speed),
        _ => Err("give a factor from 0.001 to 1000".into()),
    }
}

pub(in crate::cli) fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count > 0).ok_or_else(|| "give a whole number from 1".into())
}

/// A stretch of a trace: given in seconds, returned in milliseconds.
pub(in crate::cli) fn window(text: &str) -> Result<(f64, f64), String> {
    let (from, to) = text.split_once("..").ok_or("give two times in seconds, like 600..1200")?;
    match (from.parse::<f64>(), to.parse::<f64>()) {
        (Ok(from), Ok(to)) if from >= 0.0 && from < to && to.is_finite() => Ok((from * 1e3, to * 1e3)),
        _ => Err("give a start of at least 0 and a later end, like 600..1200".into()),
    }
}
