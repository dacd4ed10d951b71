//! A process that is killed in the middle of its writes: the next one finds every block that was
//! reported.

use baton_tiers::{Beginning, FileOptions, FileTier, FlashError, IoChoice, Tier};
use baton_types::BlockKey;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

const BLOCK_BYTES: usize = 9_000;
const CAPACITY_BLOCKS: u32 = 40;
/// Names the folder, in the process that is to be killed.
const CHILD: &str = "BATON_TIERS_KILLED";

fn open(dir: &Path) -> Result<FileTier, FlashError> {
    FileTier::open(&FileOptions {
        dir: Some(dir),
        capacity_blocks: CAPACITY_BLOCKS,
        block_bytes: BLOCK_BYTES,
        fingerprint: 8,
        io: IoChoice::Auto,
    })
}

fn block(key: u128) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|at| (key as usize * 31 + at * 7) as u8).collect()
}

/// Puts blocks and removes the oldest until it is killed; says what is lasting, and what it is
/// about to remove, before it does.
fn write_until_killed(dir: &Path) {
    let mut tier = open(dir).expect("the parent waits");
    let mut out = std::io::stdout();
    let mut say = |word: &str, key: u128| writeln!(out, "{word} {key}").and_then(|()| out.flush());
    for key in 1.. {
        if key > 30 {
            say("removes", key - 30).expect("the parent listens");
            tier.remove(BlockKey(key - 30).short());
        }
        tier.put(BlockKey(key), &block(key)).expect("the disk answers");
        say("lasts", key).expect("the parent listens");
    }
}

#[test]
fn what_a_killed_process_reported_is_there() {
    if let Some(dir) = std::env::var_os(CHILD) {
        return write_until_killed(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    for (life, upto) in [(0u32, 7), (1, 45), (2, 90)] {
        let lives = dir.path().join(life.to_string());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed::what_a_killed_process_reported_is_there", "--nocapture"])
            .env(CHILD, &lives)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (mut lasting, mut removed) = (Vec::new(), 0);
        let mut hear = |line: &str| match line.split_once(' ') {
            Some(("lasts", key)) => lasting.push(key.parse::<u128>().unwrap()),
            Some(("removes", key)) => removed = key.parse().unwrap(),
            _ => {}
        };
        for line in lines.by_ref().map_while(Result::ok) {
            hear(&line);
            if line == format!("lasts {upto}") {
                break;
            }
        }
        // It is killed wherever it has got to by now, and had said a little more.
        child.kill().unwrap();
        lines.map_while(Result::ok).for_each(|line| hear(&line));
        child.wait().unwrap();
        let mut tier = open(&lives).unwrap();
        assert!(matches!(tier.beginning(), Beginning::Recovered { lost_pages: 0, .. }));
        let mut out = vec![0; BLOCK_BYTES];
        for &key in lasting.iter().filter(|&&key| key > removed) {
            tier.get(BlockKey(key), &mut out).unwrap_or_else(|error| panic!("{key} of {lasting:?}: {error}"));
            assert_eq!(out, block(key));
        }
        assert!(lasting.len() >= upto as usize && tier.len_blocks() <= CAPACITY_BLOCKS as usize);
    }
}

#[test]
fn a_folder_has_one_user_and_foreign_files_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(dir.path()).unwrap();
    assert!(matches!(open(dir.path()).map(|_| ()), Err(FlashError::InUse)));
    drop(tier);
    let path = dir.path().join("kv.slab");
    let length = std::fs::metadata(&path).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length / 2).unwrap();
    assert!(matches!(open(dir.path()).map(|_| ()), Err(FlashError::Short { .. })));
    std::fs::write(&path, "somebody's thesis").unwrap();
    assert!(matches!(open(dir.path()).map(|_| ()), Err(FlashError::Foreign)));
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's thesis");
}

#[test]
fn only_its_user_can_read_it_and_a_temporary_one_has_no_name() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let tier = open(dir.path()).unwrap();
    let file = std::fs::metadata(dir.path().join("kv.slab")).unwrap();
    assert_eq!(file.mode() & 0o777, 0o600);
    assert!(file.len() > u64::from(CAPACITY_BLOCKS) * 12_288);
    assert!(tier.device().contains("direct") || tier.device().contains("page cache"), "{}", tier.device());
    let options =
        FileOptions { dir: None, capacity_blocks: 4, block_bytes: 10, fingerprint: 0, io: IoChoice::Threads };
    let mut tier = FileTier::open(&options).unwrap();
    assert_eq!(tier.beginning(), &Beginning::Temporary);
    tier.put(BlockKey(1), &[1; 10]).unwrap();
    let open_files = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    let names = open_files.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let mine: Vec<_> = names.filter(|name| name.to_string_lossy().contains("baton-kv-")).collect();
    assert!(mine.iter().any(|name| name.to_string_lossy().ends_with("(deleted)")), "{mine:?}");
    assert!(tier.device().starts_with("threads"), "{}", tier.device());
}

#[test]
fn more_than_the_disk_has_is_refused_at_the_start() {
    let options = FileOptions {
        dir: None,
        capacity_blocks: u32::MAX / 2,
        block_bytes: 1 << 30,
        fingerprint: 0,
        io: IoChoice::Auto,
    };
    let error = FileTier::open(&options).unwrap_err();
    assert!(error.to_string().contains("lower ssd_blocks"), "{error}");
}
