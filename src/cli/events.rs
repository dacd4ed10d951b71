//! `baton events`: what an engine announces about its cache.

use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use baton_events::{
    Batch, Change, EpochReason, Event, Feed, Medium, StoredBlocks, Subscriber, SubscriberConfig,
};
use serde_json::{Value, json};

/// Arguments of `baton events`.
#[derive(clap::Args)]
pub struct EventsArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Print what an engine announces: blocks stored and removed, batches lost, restarts
    #[command(after_help = "Examples:\n  \
        baton events watch tcp://10.0.0.5:5557 --replay tcp://10.0.0.5:5558\n  \
        baton events watch tcp://10.0.0.5:5557 --json | jq .events")]
    Watch(WatchArgs),
}

#[derive(clap::Args)]
struct WatchArgs {
    /// Where the engine publishes (vLLM: --kv-events-config, endpoint)
    #[arg(value_name = "tcp://HOST:PORT")]
    endpoint: String,
    /// Where it repeats what it published: then nothing is missed, the past included
    #[arg(long, value_name = "tcp://HOST:PORT")]
    replay: Option<String>,
    /// Only batches whose topic starts so
    #[arg(long, default_value = "")]
    topic: String,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    /// Stop after this many batches
    #[arg(long, value_name = "COUNT")]
    batches: Option<u64>,
}

/// Runs `baton events`.
///
/// # Errors
/// With one line for the user: what is wrong with the endpoint, and the remedy.
pub fn run(args: &EventsArgs) -> Result<ExitCode> {
    let Action::Watch(args) = &args.action;
    super::runtime(Some(1))?.block_on(watch(args)).map(|()| ExitCode::SUCCESS)
}

async fn watch(args: &WatchArgs) -> Result<()> {
    let config = SubscriberConfig {
        topic: args.topic.clone(),
        ..SubscriberConfig::new(args.endpoint.as_str(), args.replay.clone())
    };
    let mut subscriber = Subscriber::start(config)?;
    let (mut told, mut left) = (None, args.batches.unwrap_or(u64::MAX));
    while left > 0 {
        // Silence may have a reason, which is reported once.
        let Ok(feed) = tokio::time::timeout(Duration::from_secs(1), subscriber.next()).await else {
            let error = subscriber.status().last_error;
            if let Some(error) = error.as_ref().filter(|_| error != told) {
                note!("baton: {error}; still trying");
            }
            told = error;
            continue;
        };
        let Some(feed) = feed else { break };
        left -= u64::from(matches!(feed, Feed::Batch { .. }));
        let line = if args.json { format!("{}\n", as_json(&feed)) } else { as_text(&feed) };
        if !print(&line)? {
            break;
        }
    }
    Ok(())
}

/// Prints; `false` when the reader has closed the pipe.
fn print(text: &str) -> Result<bool> {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => bail!("output: {error}; check where standard output goes"),
    }
}

const fn reason(why: EpochReason) -> &'static str {
    match why {
        EpochReason::Started => "started",
        EpochReason::Restarted => "the engine restarted",
        EpochReason::Lost => "batches were lost",
    }
}

fn as_text(feed: &Feed) -> String {
    match feed {
        Feed::Cleared { epoch, why } => format!("epoch {epoch}: {}\n", reason(*why)),
        Feed::Batch { batch, .. } => {
            let rank = batch.dp_rank.map_or_else(String::new, |rank| format!(" rank {rank}"));
            let mut text = String::new();
            for event in &batch.events {
                let _ = writeln!(text, "{}{rank} {}", batch.sequence, words(&event.change));
            }
            if batch.events.is_empty() {
                let _ = writeln!(text, "{}{rank} nothing", batch.sequence);
            }
            text
        }
    }
}

fn place(medium: Option<&Medium>) -> &str {
    medium.map_or("GPU", Medium::word)
}

fn words(change: &Change) -> String {
    match change {
        Change::Stored(stored) => stored_words(stored),
        Change::Removed(removed) => {
            format!("removed {} blocks from {}", removed.hashes.len(), place(removed.medium.as_ref()))
        }
        Change::Cleared(None) => "cleared".into(),
        Change::Cleared(Some(medium)) => format!("cleared {}", medium.word()),
        Change::Unknown(kind) => format!("an event of unknown kind '{kind}'"),
    }
}

fn stored_words(stored: &StoredBlocks) -> String {
    let (blocks, size) = (stored.hashes.len(), stored.block_tokens);
    let mut text = format!("stored {blocks} blocks of {size} tokens in {}", place(stored.medium.as_ref()));
    if let Some(last) = stored.hashes.last() {
        let _ = write!(text, " up to {:016x}", last.low64());
    }
    match stored.parent {
        Some(parent) => drop(write!(text, ", after {:016x}", parent.low64())),
        None => text.push_str(", from the root"),
    }
    if let Some(lora) = &stored.lora {
        let _ = write!(text, ", adapter {lora}");
    }
    if !stored.extra.is_empty() {
        let _ = write!(text, ", {} blocks with extra keys", stored.extra.len());
    }
    if let Some(group) = stored.group.filter(|group| *group > 0) {
        let _ = write!(text, ", cache group {group}");
    }
    text
}

fn as_json(feed: &Feed) -> Value {
    match feed {
        Feed::Cleared { epoch, why } => json!({ "epoch": epoch, "cleared": reason(*why) }),
        Feed::Batch { epoch, batch } => batch_json(*epoch, batch),
    }
}

fn batch_json(epoch: u64, batch: &Batch) -> Value {
    let events: Vec<Value> = batch.events.iter().map(event_json).collect();
    json!({
        "epoch": epoch, "sequence": batch.sequence, "time_us": batch.time_us, "dp_rank": batch.dp_rank,
        "events": events,
    })
}

fn event_json(event: &Event) -> Value {
    match &event.change {
        Change::Stored(stored) => json!({
            "stored": names(&stored.hashes), "parent": stored.parent.map(|parent| parent.to_string()),
            "tokens": stored.tokens, "block_tokens": stored.block_tokens, "lora": stored.lora,
            "medium": place(stored.medium.as_ref()), "cache_group": stored.group,
            "keyed_blocks": stored.extra.iter().map(|extra| extra.block).collect::<Vec<_>>(),
        }),
        Change::Removed(removed) => json!({
            "removed": names(&removed.hashes), "medium": place(removed.medium.as_ref()),
            "cache_group": removed.group,
        }),
        Change::Cleared(medium) => json!({ "cleared": medium.as_ref().map_or("all", Medium::word) }),
        Change::Unknown(kind) => json!({ "unknown": kind }),
    }
}

fn names(hashes: &[baton_events::EngineHash]) -> Vec<String> {
    hashes.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_events::{EngineHash, RemovedBlocks};

    fn feed(changes: Vec<Change>) -> Feed {
        let events = changes.into_iter().map(Event::from).collect();
        Feed::Batch { epoch: 1, batch: Batch { sequence: 7, time_us: 5, dp_rank: Some(2), events } }
    }

    fn stored() -> StoredBlocks {
        StoredBlocks {
            hashes: vec![EngineHash::Word(1), EngineHash::Word(2)],
            tokens: vec![9; 4],
            block_tokens: 2,
            medium: Some(Medium::Cpu),
            ..StoredBlocks::default()
        }
    }

    #[test]
    fn an_event_is_a_line() {
        let removed = RemovedBlocks { hashes: vec![EngineHash::Word(1)], medium: None, group: None };
        let after =
            StoredBlocks { parent: Some(EngineHash::Word(255)), lora: Some("poet".into()), ..stored() };
        let changes = vec![
            Change::Stored(stored()),
            Change::Stored(after),
            Change::Removed(removed),
            Change::Cleared(None),
        ];
        let text = as_text(&feed(changes));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "7 rank 2 stored 2 blocks of 2 tokens in CPU up to 0000000000000002, from the root"
        );
        assert!(lines[1].ends_with(", after 00000000000000ff, adapter poet"), "{}", lines[1]);
        assert_eq!(lines[2..], ["7 rank 2 removed 1 blocks from GPU", "7 rank 2 cleared"]);
        assert_eq!(
            as_text(&Feed::Cleared { epoch: 3, why: EpochReason::Restarted }),
            "epoch 3: the engine restarted\n"
        );
        assert_eq!(as_text(&feed(vec![])), "7 rank 2 nothing\n");
    }

    #[test]
    fn json_has_every_field_that_a_script_needs() {
        let value = as_json(&feed(vec![Change::Stored(stored()), Change::Unknown("dreamt".into())]));
        assert_eq!(value["sequence"], 7);
        assert_eq!(value["events"][0]["stored"][1], "0000000000000002");
        assert_eq!(
            (&value["events"][0]["medium"], &value["events"][0]["tokens"][3]),
            (&json!("CPU"), &json!(9))
        );
        assert_eq!(value["events"][1], json!({ "unknown": "dreamt" }));
        assert_eq!(
            as_json(&Feed::Cleared { epoch: 1, why: EpochReason::Lost })["cleared"],
            "batches were lost"
        );
    }
}
