//! A journal replays identically, whatever was recorded, and damage anywhere in it is found.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_scheduler::{
    CandidateTerms, Conductor, Decision, Effect, Input, InstanceSpec, Request, SchedulerConfig,
};
use baton_types::{
    BlockHash, CacheChange, CacheEvent, ClassId, CostProfile, DecodeCost, Epoch, FitReport, InstanceId,
    PrefillCost, RequestId, Rng, Role, SloClass, TenantId, Tier, ValidRange,
};

use super::disk::Step;
use super::writer::step_bytes;
use super::{End, JournalError, JournalSettings, JournalStatus, JournalWriter, ReplayReport, replay};

/// A driver with a mind of its own: obeys at random, reports failures, and changes things.
struct Driver {
    rng: Rng,
    now_us: u64,
    next_id: u64,
    /// The requests that are open: each with the input that would come next for it.
    open: Vec<Input>,
}

/// A tenth of a millisecond a prompt token, ten to twenty a decode step.
fn profile() -> CostProfile {
    CostProfile {
        name: "round".into(),
        source: "made up for tests".into(),
        kv_bytes_per_token: 1000,
        kv_capacity_tokens: 200_000,
        layers: 10,
        shared_us: 1000.3,
        fit: FitReport::default(),
        valid: ValidRange::default(),
        prefill: PrefillCost {
            knots_tokens: vec![0, 1000],
            knots_us: vec![1000.1, 101_000.7],
            attention_ps_per_pair: 0.3,
        },
        decode: DecodeCost {
            batches: vec![1, 64],
            base_us: vec![10_000.0, 20_000.0],
            context_ps_per_token: vec![100.0, 100.0],
        },
    }
}

fn instance(id: u32, epoch: u32) -> InstanceSpec {
    InstanceSpec {
        id: InstanceId(id),
        epoch: Epoch(epoch),
        role: if id < 2 { Role::Prefill } else { Role::Decode },
        profile: Arc::new(profile()),
        capacity_tokens: 200_000,
        pass_tokens: 8192,
        pipeline_nodes: 1,
        mixed_chunk_tokens: None,
        max_running: None,
        net_bytes_per_s: 100_000_000_000,
        host_bytes_per_s: 100_000_000_000,
        ssd_bytes_per_s: 6_000_000_000,
        may_change_role: false,
        engine_moves_kv: false,
        kind: 0,
    }
}

fn config() -> SchedulerConfig {
    let urgent = SloClass { name: "urgent".into(), priority: 1, ttft_us: 2_000_000, ..SloClass::default() };
    SchedulerConfig {
        classes: vec![SloClass::default(), urgent],
        explain_every: 3,
        ..SchedulerConfig::default()
    }
}

impl Driver {
    fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), now_us: 0, next_id: 1, open: Vec::new() }
    }

    fn small(&mut self, bound: u64) -> u32 {
        u32::try_from(self.rng.below(bound)).expect("small")
    }

    fn drive(&mut self, conductor: &mut Conductor, journal: &mut JournalWriter, steps: u32) {
        let mut effects = Vec::new();
        for _ in 0..steps {
            effects.clear();
            let input = self.input();
            journal.step(conductor, self.now_us, input, &mut effects);
            self.hears(&effects);
        }
    }

    fn input(&mut self) -> Input {
        self.now_us += self.rng.below(200_000);
        let known = |driver: &mut Self| driver.rng.below(driver.open.len() as u64);
        match self.rng.below(100) {
            0..35 => self.arrival(),
            35..70 if !self.open.is_empty() => {
                let at = usize::try_from(known(self)).expect("an index");
                self.open.swap_remove(at)
            }
            70..73 if !self.open.is_empty() => {
                Input::RequestCancelled { request: RequestId(self.rng.below(self.next_id)) }
            }
            73..76 => Input::PrefillFailed { request: RequestId(self.rng.below(self.next_id)) },
            76 => Input::LegRefused {
                request: RequestId(self.rng.below(self.next_id)),
                instance: InstanceId(self.small(4)),
                emitted_tokens: self.small(99),
                busy_us: self.rng.below(3_000_000),
            },
            77..79 => Input::DecodeFailed {
                request: RequestId(self.rng.below(self.next_id)),
                emitted_tokens: self.small(99),
            },
            79 if self.rng.below(2) == 0 => Input::Preempted {
                request: RequestId(self.rng.below(self.next_id)),
                emitted_tokens: self.small(99),
            },
            80 if self.rng.below(2) == 0 => Input::RoomOutgrown {
                request: RequestId(self.rng.below(self.next_id)),
                emitted_tokens: self.small(2000),
            },
            79 => Input::InstanceLost { instance: InstanceId(self.small(4)), epoch: Epoch(1) },
            80 => Input::InstanceJoined(instance(self.small(4), 2)),
            81 => {
                let ttft_us = 1_000_000 + self.rng.below(30_000_000);
                let mut new = config();
                new.classes[0].ttft_us = ttft_us;
                Input::PolicyChanged(Box::new(new))
            }
            82..92 => {
                let change = CacheChange::Stored { parent: None, hashes: self.chain(8), tier: Tier::Hbm };
                Input::Cache(CacheEvent { instance: InstanceId(self.small(4)), epoch: Epoch(1), change })
            }
            _ => Input::TimerFired,
        }
    }

    /// Leading blocks of one of a few documents: each name stands for all that comes before it, too.
    fn chain(&mut self, blocks: u64) -> Vec<BlockHash> {
        let document = self.rng.below(20) << 32;
        (1..=blocks).map(|block| BlockHash(document | block)).collect()
    }

    fn arrival(&mut self) -> Input {
        self.next_id += 1;
        let prompt_tokens = 1 + self.rng.below(30_000);
        Input::RequestArrived(Request {
            id: RequestId(self.next_id),
            class: ClassId(u16::try_from(self.rng.below(3)).expect("small")),
            tenant: TenantId(self.small(3)),
            prompt_tokens,
            chain: self.chain(prompt_tokens.div_ceil(512)),
            ..Request::default()
        })
    }

    fn hears(&mut self, effects: &[Effect]) {
        for effect in effects {
            match *effect {
                Effect::StartPrefill { request, .. } => {
                    let compute_us = self.rng.below(1_000_000);
                    self.open.push(Input::PrefillFinished { request, compute_us, cached_tokens: 0 });
                    self.open.push(Input::HandoffFinished { request });
                }
                Effect::StartDecode { request, .. } => {
                    let output_tokens = self.small(500);
                    self.open.push(Input::DecodeFinished { request, output_tokens, first_us: 0, tbt_us: 0 });
                }
                _ => {}
            }
        }
    }
}

fn conductor() -> Conductor {
    Conductor::new(config()).expect("a valid config")
}

/// Records a run of so many random steps; returns how the journal fared.
fn record(settings: JournalSettings, seed: u64, steps: u32) -> JournalStatus {
    let (mut conductor, mut driver) = (conductor(), Driver::new(seed));
    let mut journal = JournalWriter::open(settings, &conductor).expect("a folder that can be written");
    for id in 0..4 {
        journal.step(&mut conductor, 0, Input::InstanceJoined(instance(id, 1)), &mut Vec::new());
    }
    // The disk is at most a few steps behind, so that files end where their bytes say.
    for _ in 0..steps {
        driver.drive(&mut conductor, &mut journal, 1);
        journal.settle();
    }
    // A quiet moment now and then would come by itself in service.
    journal.close()
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(directory).expect("a folder").map(|e| e.expect("an entry").path()).collect();
    files.sort();
    files
}

fn again(path: &Path) -> Result<ReplayReport, JournalError> {
    replay(std::io::BufReader::new(std::fs::File::open(path).expect("a file")))
}

#[test]
fn any_run_replays_identically() {
    for seed in 0..8 {
        let place = tempfile::tempdir().expect("a temporary folder");
        let status = record(JournalSettings::new(place.path()), seed, 2000);
        assert_eq!((status.steps, status.lost_steps, status.files, &status.error), (2004, 0, 1, &None));
        let all = files(place.path());
        let found = again(&all[0]).expect("the same effects");
        assert_eq!((all.len(), found.steps, found.end, found.torn), (1, 2004, Some(End::Closed), false));
        let summary = &found.summary;
        assert!(summary.requests > 500 && summary.finished > 10, "{summary:?}");
        assert!(summary.decisions["prefill"] > 50 && !summary.rejections.is_empty(), "{summary:?}");
    }
}

#[test]
fn a_file_is_followed_by_others_that_each_stand_alone() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let settings =
        JournalSettings { rotate_bytes: 60_000, keep_files: 3, ..JournalSettings::new(place.path()) };
    let status = record(settings.clone(), 3, 3000);
    let all = files(place.path());
    assert!(status.files > 4 && all.len() == 3, "{status:?} {all:?}");
    let found: Vec<ReplayReport> = all.iter().map(|f| again(f).expect("the same effects")).collect();
    // The last one was begun shortly before the end, or long before.
    assert!(found[..2].iter().all(|f| f.steps > 20) && found[2].steps > 0, "{found:?}");
    assert_eq!(
        found.iter().map(|f| f.end).collect::<Vec<_>>(),
        [Some(End::Rotated), Some(End::Rotated), Some(End::Closed)]
    );
    // The first line has the state, which is as large as it is.
    let file = std::fs::read(&all[0]).expect("a file");
    let header = file.iter().position(|byte| *byte == b'\n').expect("a line");
    assert!(file.len() - header < 60_000 * 3, "{} bytes behind {header}", file.len() - header);
    // The next service goes on numbering.
    record(settings, 4, 10);
    assert!(files(place.path()).last() > all.last());
}

#[test]
fn a_conductor_too_large_for_a_header_ends_the_journal_honestly() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let settings = JournalSettings {
        rotate_bytes: 5_000,
        base_blocks: 3,
        keep_files: 9999,
        ..JournalSettings::new(place.path())
    };
    let (mut conductor, mut effects) = (conductor(), Vec::new());
    let mut journal = JournalWriter::open(settings, &conductor).expect("a folder that can be written");
    let stored = |hashes: u64, removed: bool| {
        let (hashes, tier) = ((0..hashes).map(BlockHash).collect(), Tier::Hbm);
        let change = if removed {
            CacheChange::Removed { hashes, tier }
        } else {
            CacheChange::Stored { parent: None, hashes, tier }
        };
        Input::Cache(CacheEvent { instance: InstanceId(0), epoch: Epoch(1), change })
    };
    let mut feed = |journal: &mut JournalWriter, input| journal.step(&mut conductor, 1, input, &mut effects);
    feed(&mut journal, Input::InstanceJoined(instance(0, 1)));
    feed(&mut journal, stored(4, false));
    (0..1000).for_each(|_| {
        feed(&mut journal, Input::TimerFired);
        journal.settle();
    });
    let lost = journal.status().lost_steps;
    assert!(lost > 500, "{lost}");
    // Once it is small enough again, a new file begins.
    feed(&mut journal, stored(4, true));
    (0..10_000).for_each(|_| {
        std::thread::yield_now();
        feed(&mut journal, Input::TimerFired);
    });
    let status = journal.close();
    assert_eq!(status.steps + status.lost_steps, 11_003);
    let found: Vec<ReplayReport> =
        files(place.path()).iter().map(|f| again(f).expect("the same effects")).collect();
    assert!(found.len() >= 2 && found[0].steps > 100, "{found:?}");
    assert_eq!(found[0].end, Some(End::Truncated));
}

#[test]
fn a_disk_that_does_not_keep_up_costs_lines_that_are_counted() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let (mut conductor, mut driver) = (conductor(), Driver::new(6));
    let mut journal = JournalWriter::open(JournalSettings::new(place.path()), &conductor).expect("a folder");
    for id in 0..4 {
        journal.step(&mut conductor, 0, Input::InstanceJoined(instance(id, 1)), &mut Vec::new());
    }
    for _ in 0..2 {
        driver.drive(&mut conductor, &mut journal, 200);
        journal.fall_behind();
        driver.drive(&mut conductor, &mut journal, 100);
        journal.catch_up();
    }
    driver.drive(&mut conductor, &mut journal, 200);
    let status = journal.close();
    assert_eq!((status.steps, status.lost_steps), (604, 200), "{status:?}");
    let found: Vec<(u64, u64)> = files(place.path())
        .iter()
        .map(|f| again(f).expect("what is there is sound"))
        .map(|file| (file.steps, file.lost_steps))
        .collect();
    assert_eq!(found, [(204, 100), (200, 100), (200, 0)]);
}

/// The folder is gone for a while, as a full disk is: nothing can be written until a later try.
#[test]
fn a_disk_that_failed_is_tried_again_and_the_gap_is_recorded() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let (folder, away) = (place.path().join("journal"), place.path().join("away"));
    let (mut conductor, mut driver) = (conductor(), Driver::new(6));
    let settings = JournalSettings { rotate_bytes: 20_000, keep_files: 99, ..JournalSettings::new(&folder) };
    let mut journal = JournalWriter::open(settings, &conductor).expect("a folder");
    for id in 0..4 {
        journal.step(&mut conductor, 0, Input::InstanceJoined(instance(id, 1)), &mut Vec::new());
    }
    journal.settle();
    std::fs::rename(&folder, &away).expect("moved");
    let mut drive = |journal: &mut JournalWriter, until: &dyn Fn(&JournalWriter) -> bool| {
        for _ in 0..20_000 {
            driver.drive(&mut conductor, journal, 1);
            journal.settle();
            if until(journal) {
                return driver.now_us;
            }
        }
        panic!("{:?}", journal.status());
    };
    let failed_us = drive(&mut journal, &|journal| journal.status().error.is_some());
    let tries = journal.status().files + 2;
    drive(&mut journal, &|journal| journal.status().files == tries);
    assert!(journal.status().error.is_some_and(|error| error.contains("tried again")));
    std::fs::rename(&away, &folder).expect("moved back");
    let back_us = drive(&mut journal, &|journal| journal.status().error.is_none());
    assert!(back_us - failed_us >= 3 * 60_000_000, "it is tried once a minute");
    let lost = journal.status().lost_steps;
    assert!(lost > 100, "{lost}");
    drive(&mut journal, &|journal| journal.status().files > tries + 2);
    let status = journal.close();
    let found: Vec<ReplayReport> =
        files(&folder).iter().map(|f| again(f).expect("what is there is sound")).collect();
    assert_eq!(found[0].lost_steps_before, 0);
    assert!(
        found[1..].iter().all(|file| (file.lost_steps_before, file.lost_steps) == (lost, 0)),
        "{found:?}"
    );
    assert_eq!((found.iter().map(|file| file.steps).sum(), status.lost_steps), (status.steps, lost));
}

/// The bound is one of memory: a step counts with all that it points to.
#[test]
fn long_prompts_and_decisions_count_with_all_their_blocks_and_candidates() {
    let bytes = |blocks: u64, candidates: usize| {
        let chain = (0..blocks).map(BlockHash).collect();
        let input = Input::RequestArrived(Request { chain, ..Request::default() });
        let terms = CandidateTerms {
            instance: InstanceId(0),
            queue_us: 0,
            load_us: None,
            compute_us: None,
            cached_tokens: 0,
            fetch_from: None,
            ttft_us: None,
            score: None,
            feasible: false,
        };
        let (request, candidates) = (RequestId(1), vec![terms; candidates]);
        let effects = vec![Effect::Explain(Decision { request, at_us: 1, chosen: None, candidates })];
        step_bytes(&Step { now_us: 1, input, effects })
    };
    assert!(bytes(0, 0) >= (size_of::<Step>() + size_of::<Effect>()) as u64, "{}", bytes(0, 0));
    assert_eq!(bytes(1_000, 0) - bytes(0, 0), 8_000);
    assert_eq!(bytes(0, 32) - bytes(0, 0), 32 * size_of::<CandidateTerms>() as u64);
}

#[test]
fn a_flipped_byte_anywhere_is_found() {
    let place = tempfile::tempdir().expect("a temporary folder");
    record(JournalSettings::new(place.path()), 7, 60);
    let path = files(place.path()).remove(0);
    let good = std::fs::read(&path).expect("a file");
    let whole = again(&path).expect("sound");
    let mut rng = Rng::new(1);
    for turn in 0..300 {
        let mut bad = good.clone();
        let at = usize::try_from(rng.below(good.len() as u64)).expect("an index");
        bad[at] ^= 1 << rng.below(8);
        let found = replay(bad.as_slice());
        // The very last byte ends a line: without it that line is torn, which is said.
        assert!(found.as_ref().ok() != Some(&whole), "turn {turn}: byte {at} of {}", good.len());
        assert!(found.is_err() || at + 1 == good.len(), "byte {at}");
    }
}

#[test]
fn another_order_of_effects_is_a_divergence_and_the_input_is_shown() {
    let place = tempfile::tempdir().expect("a temporary folder");
    record(JournalSettings::new(place.path()), 8, 200);
    let text = std::fs::read_to_string(files(place.path()).remove(0)).expect("a file");
    // A journal with sound checksums, of a conductor that decided something else once.
    let (mut chain, mut sealed, mut wrong) = (super::Chain::default(), super::Chain::default(), None);
    let mut forged = String::new();
    for (number, line) in (1..).zip(text.lines()) {
        let mut json = chain.open(line).expect("sound");
        let empty = super::digest(&[]).expect("nothing");
        if wrong.is_none() && json.contains("request_arrived") && !json.contains(&empty) {
            let at = json.find("\"effects\":\"").expect("a step") + 11;
            json.replace_range(at..at + 16, &empty);
            wrong = Some(number);
        }
        forged.push_str(&sealed.seal(json));
    }
    let error = replay(forged.as_bytes()).expect_err("a divergence").to_string();
    let line = wrong.expect("some decision was recorded");
    assert!(error.contains(&format!("line {line},")) && error.contains("request_arrived"), "{error}");
}

/// Another format may have any state and any settings: nothing beyond its version can be read.
#[test]
fn another_format_is_refused_by_its_version_whatever_its_state_is() {
    let sealed = |json: &str| super::Chain::default().seal(json.to_owned());
    for (json, words) in [
        (
            r#"{"header":{"version":3,"program":"0.9.0","start_unix_us":1,"base":{"ageing_us":5}}}"#,
            "line 1: format 3, written by baton 0.9.0; this baton reads format 12: replay the file with the baton that",
        ),
        (r#"{"header":{"version":99,"epoch":[],"base":"elsewhere"}}"#, "line 1: format 99, "),
        (
            r#"{"header":{"version":12,"program":"0.9.0","start_unix_us":1,"base":{"ageing_us":5}}}"#,
            "ageing_us",
        ),
        (r#"{"header":{"program":"0.9.0"}}"#, "line 1: no journal header"),
        (r#"{"lost":3}"#, "line 1: no journal header"),
    ] {
        let error = replay(sealed(json).as_bytes()).expect_err(json).to_string();
        assert!(error.contains(words), "{json}: {error}");
    }
}

#[test]
fn a_torn_end_is_told_and_what_is_before_it_replays() {
    let place = tempfile::tempdir().expect("a temporary folder");
    record(JournalSettings::new(place.path()), 9, 50);
    let good = std::fs::read(files(place.path()).remove(0)).expect("a file");
    let found = replay(&good[..good.len() - 30]).expect("sound so far");
    assert!(found.torn && found.end.is_none() && found.steps >= 53, "{found:?}");
    let lines = good.iter().filter(|b| **b == b'\n').count();
    let end = good.iter().enumerate().filter(|(_, b)| **b == b'\n').nth(lines - 2).expect("lines").0;
    let found = replay(&good[..=end]).expect("sound so far");
    assert_eq!((found.torn, found.end, found.steps), (false, None, 54));
}

#[test]
fn a_folder_that_cannot_be_is_named() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let file = place.path().join("file");
    std::fs::write(&file, "").expect("written");
    let error = JournalWriter::open(JournalSettings::new(file.join("x")), &conductor())
        .expect_err("below a file")
        .to_string();
    assert!(error.contains("file/x") && error.contains("folder"), "{error}");
}

/// Journals that were just written.
pub(super) fn recorded() -> Vec<Vec<u8>> {
    let one = |(seed, steps)| {
        let place = tempfile::tempdir().expect("a temporary folder");
        record(JournalSettings::new(place.path()), seed, steps);
        std::fs::read(&files(place.path())[0]).expect("a file")
    };
    [(1, 12), (2, 60)].map(one).to_vec()
}

/// Measures what the journal adds to a step on the deciding thread, next to the JSON that this thread once wrote itself.
#[test]
#[ignore = "a benchmark: cargo test --release -p baton --bin baton what_the_journal_adds -- --ignored --nocapture"]
fn what_the_journal_adds_to_a_step() {
    const ROUNDS: u32 = 500;
    const BLOCKS: u64 = 8_192;
    const BLOCK_TOKENS: u32 = 16;
    let place = tempfile::tempdir().expect("a temporary folder");
    let [alone, journalled, as_json] = ["alone", "journalled", "as_json"].map(|mode| {
        let config = SchedulerConfig { explain_every: 1, block_tokens: BLOCK_TOKENS, ..config() };
        let (mut conductor, mut effects) = (Conductor::new(config).expect("a valid config"), Vec::new());
        let mut journal =
            JournalWriter::open(JournalSettings::new(place.path()), &conductor).expect("a folder");
        let (mut spent, mut chain) = (std::time::Duration::ZERO, super::Chain::default());
        let mut step = |now_us: u32, input: Input| {
            let began = std::time::Instant::now();
            let json = (mode == "as_json").then(|| serde_json::to_string(&input).expect("JSON"));
            match mode {
                "journalled" => journal.step(&mut conductor, now_us.into(), input, &mut effects),
                _ => conductor.step(now_us.into(), input, &mut effects),
            }
            let line = json.map(|json| format!("{json}{}}}", super::digest(&effects).expect("JSON")));
            std::hint::black_box(line.map(|line| chain.seal(line)));
            spent += began.elapsed();
            effects.clear();
            // The disk keeps up, as in service.
            journal.settle();
        };
        for id in 0..32 {
            let role = if id % 2 == 0 { Role::Prefill } else { Role::Decode };
            step(0, Input::InstanceJoined(InstanceSpec { role, ..instance(id, 1) }));
        }
        for round in 1..=ROUNDS {
            let id = RequestId(round.into());
            let chain = (1..=BLOCKS).map(|block| BlockHash(u64::from(round) << 32 | block)).collect();
            let prompt_tokens = BLOCKS * u64::from(BLOCK_TOKENS);
            step(round, Input::RequestArrived(Request { id, prompt_tokens, chain, ..Request::default() }));
            step(round, Input::RequestCancelled { request: id });
        }
        assert_eq!(conductor.stats().arrived, u64::from(ROUNDS));
        assert_eq!(journal.close().lost_steps, 0);
        spent / ROUNDS
    });
    println!(
        "a prompt of {BLOCKS} blocks comes and goes: {alone:?} alone, {journalled:?} with the journal, {as_json:?} with \
         its JSON"
    );
}
