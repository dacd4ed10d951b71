//! An engine's load out of its `/metrics`: Prometheus' text, read line by line.

/// Samples that are kept of a page, at most.
const MAX_SAMPLES: usize = 65_536;

/// One line of a page.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: Vec<(String, String)>,
    pub(crate) value: f64,
}

impl Sample {
    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// An engine's load, by its own figures. A figure that it does not report is `None`, which is not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests that it works on.
    pub running: u64,
    /// Requests that wait, for KV of another instance as well.
    pub waiting: u64,
    /// Share of the KV pool in use, 0–1; of the fullest rank where there are several.
    pub kv_used_share: Option<f64>,
    /// Prompt tokens looked up in the prefix cache, since the start.
    pub prefix_asked_tokens: Option<u64>,
    /// Those that were found there.
    pub prefix_hit_tokens: Option<u64>,
    /// Prompt tokens whose KV came from another instance, since the start.
    pub received_tokens: Option<u64>,
    /// Hand-offs whose lease ran out before anyone came, since the start.
    pub expired_handoffs: Option<u64>,
    /// When the engine started, in seconds since 1970.
    pub start_time_s: Option<f64>,
}

/// Metrics that wait for something else than compute, in SGLang's prefill and decode instances.
const SGLANG_WAITING: &[&str] = &[
    "sglang:num_queue_reqs",
    "sglang:num_prefill_prealloc_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
];

/// The load, when the page is an engine's.
pub(crate) fn of(samples: &[Sample]) -> Option<Load> {
    let load = vllm(samples).or_else(|| sglang(samples)).or_else(|| llama(samples))?;
    Some(Load { start_time_s: start_time_s(samples), ..load })
}

/// When the engine's process started, in seconds since 1970.
pub(crate) fn start_time_s(samples: &[Sample]) -> Option<f64> {
    let started = samples.iter().find(|sample| sample.name == "process_start_time_seconds")?;
    Some(started.value).filter(|value| value.is_finite())
}

fn vllm(samples: &[Sample]) -> Option<Load> {
    let sum = |name: &str| total(samples, name, |_| true);
    Some(Load {
        running: sum("vllm:num_requests_running")?,
        waiting: sum("vllm:num_requests_waiting")?,
        kv_used_share: most(samples, "vllm:kv_cache_usage_perc")
            .or_else(|| most(samples, "vllm:gpu_cache_usage_perc")),
        prefix_asked_tokens: sum("vllm:prefix_cache_queries_total")
            .or_else(|| sum("vllm:gpu_prefix_cache_queries_total")),
        prefix_hit_tokens: sum("vllm:prefix_cache_hits_total")
            .or_else(|| sum("vllm:gpu_prefix_cache_hits_total")),
        received_tokens: total(samples, "vllm:prompt_tokens_by_source_total", |sample| {
            sample.label("source") == Some("external_kv_transfer")
        }),
        expired_handoffs: sum("vllm:nixl_num_kv_expired_reqs_total")
            .or_else(|| sum("vllm:mooncake_num_kv_expired_reqs_total")),
        start_time_s: None,
    })
}

fn sglang(samples: &[Sample]) -> Option<Load> {
    // Every tensor-parallel rank may tell the same figures.
    let first = |sample: &Sample| sample.label("tp_rank").is_none_or(|rank| rank == "0");
    let sum = |name: &str| total(samples, name, first);
    Some(Load {
        running: sum("sglang:num_running_reqs")?,
        waiting: SGLANG_WAITING.iter().filter_map(|name| sum(name)).sum(),
        kv_used_share: most(samples, "sglang:token_usage"),
        prefix_asked_tokens: sum("sglang:prompt_tokens_total"),
        prefix_hit_tokens: sum("sglang:cached_tokens_total"),
        ..Load::default()
    })
}

fn llama(samples: &[Sample]) -> Option<Load> {
    let sum = |name: &str| total(samples, name, |_| true);
    Some(Load {
        running: sum("llamacpp:requests_processing")?,
        waiting: sum("llamacpp:requests_deferred")?,
        kv_used_share: most(samples, "llamacpp:kv_cache_usage_ratio"),
        ..Load::default()
    })
}

fn total(samples: &[Sample], name: &str, counts: impl Fn(&Sample) -> bool) -> Option<u64> {
    let mut found = samples.iter().filter(|sample| sample.name == name && counts(sample)).peekable();
    found.peek()?;
    // Counts are whole, not negative, and far below 2^53; a float that is not one is no count.
    let sum: f64 = found.map(|sample| sample.value).filter(|value| value.is_finite() && *value >= 0.0).sum();
    Some(sum.round() as u64)
}

fn most(samples: &[Sample], name: &str) -> Option<f64> {
    let values = samples.iter().filter(|sample| sample.name == name).map(|sample| sample.value);
    values.filter(|value| value.is_finite()).map(|value| value.clamp(0.0, 1.0)).reduce(f64::max)
}

/// The samples of a page. Lines that are none are passed over: a page may have extensions that mean nothing here.
pub(crate) fn parse(page: &str) -> Vec<Sample> {
    page.lines().filter_map(sample).take(MAX_SAMPLES).collect()
}

fn sample(line: &str) -> Option<Sample> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    // A time stamp may follow the value.
    let value = rest.split_whitespace().next()?;
    let value = match value {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        other => other.parse().ok()?,
    };
    Some(Sample { name: name.to_owned(), labels, value })
}

/// Labels up to the closing brace, and what follows it.
fn labels(text: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    let mut rest = text.trim_start();
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once('=')?;
        let (value, after) = quoted(after.trim_start().strip_prefix('"')?)?;
        labels.push((name.trim().to_owned(), value));
        rest = after.trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
}

/// A quoted value up to its closing quote, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Lines of vllm_metrics.txt, vLLM 0.32.
    const VLLM: &str = r#"
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 3409.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7952298165122933e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 288.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 3121.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 7.0
"#;

    #[test]
    fn vllms_page_is_read() {
        let load = of(&parse(VLLM)).unwrap();
        assert_eq!((load.running, load.waiting, load.kv_used_share), (0, 0, Some(0.0)));
        assert_eq!((load.prefix_asked_tokens, load.prefix_hit_tokens), (Some(3409), Some(288)));
        assert_eq!((load.received_tokens, load.expired_handoffs), (Some(7), None));
    }

    #[test]
    fn ranks_are_summed_and_copies_are_not() {
        let page = "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} 3\n\
                    vllm:num_requests_waiting{engine=\"0\"} 1\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
                    vllm:kv_cache_usage_perc{engine=\"1\"} 0.75\n";
        let load = of(&parse(page)).unwrap();
        assert_eq!((load.running, load.waiting, load.kv_used_share), (5, 1, Some(0.75)));
        let page = "sglang:num_running_reqs{tp_rank=\"0\"} 2.0\nsglang:num_running_reqs{tp_rank=\"1\"} 2.0\n\
                    sglang:num_queue_reqs{tp_rank=\"0\"} 1.0\nsglang:num_decode_transfer_queue_reqs{tp_rank=\"0\"} 4.0\n\
                    sglang:token_usage{tp_rank=\"0\"} 0.5\n";
        let load = of(&parse(page)).unwrap();
        assert_eq!((load.running, load.waiting, load.kv_used_share), (2, 5, Some(0.5)));
    }

    #[test]
    fn a_page_of_something_else_is_no_load() {
        assert_eq!(of(&parse("process_open_fds 34.0\n")), None);
        assert_eq!(of(&[]), None);
        let load = of(&parse("llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n")).unwrap();
        assert_eq!((load.running, load.waiting, load.kv_used_share), (1, 2, None));
    }

    #[test]
    fn lines_are_read_as_the_format_has_them() {
        let read = parse(
            "a{x=\"1,}\\\"\\n\\\\\" , y=\"\"} 1e3 1395066363000\nb +Inf\nc NaN\nd\n{\ne{x=1} 2\nf{x=\"1} 2\ng{} 5\n",
        );
        let names: Vec<&str> = read.iter().map(|sample| sample.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c", "g"]);
        assert_eq!(
            (read[0].label("x"), read[0].label("y"), read[0].value),
            (Some("1,}\"\n\\"), Some(""), 1e3)
        );
        assert_eq!(
            of(&parse("vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n")).unwrap().running,
            0
        );
    }

    proptest! {
        #[test]
        fn no_page_breaks_it(page in "[a-z{}=\"\\\\,# \n0-9.]{0,200}") {
            let _ = of(&parse(&page));
        }
    }
}
