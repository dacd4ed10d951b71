//! A run over one parser: its corpus, damaged inputs, and what is asked of the parser.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use baton_types::Rng;

use crate::counting;
use crate::coverage::Coverage;
use crate::damage::Mutator;

/// Inputs that are damaged further, beside the corpus.
const POOL: usize = 2_000;
/// An input that a parser is at for so long never ends.
const HANG: Duration = Duration::from_secs(60);
/// Allocated at once, this ends the process before it harms the machine.
const MEMORY_MAX: usize = 2 << 30;

/// A parser's verdict on an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It was read.
    Read,
    /// It was refused.
    Refused,
}

impl Verdict {
    /// Of what a parser returned.
    pub fn of<T, E>(result: &Result<T, E>) -> Self {
        if result.is_ok() { Self::Read } else { Self::Refused }
    }
}

/// A run over the parser whose inputs are in `corpus/NAME`.
#[derive(Clone, Debug)]
pub struct Fuzz {
    name: &'static str,
    cases: u64,
    words: &'static [&'static [u8]],
    seal: fn(&mut Vec<u8>),
    max_bytes: usize,
    slowest: Duration,
    memory: Option<(usize, usize)>,
    made: Vec<Vec<u8>>,
}

impl Fuzz {
    /// A run of 5,000 cases with inputs of at most 64 KiB, each of which is read within two seconds.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        let (max_bytes, slowest) = (64 << 10, Duration::from_secs(2));
        Self {
            name,
            cases: 5_000,
            words: &[],
            seal: |_| {},
            max_bytes,
            slowest,
            memory: None,
            made: Vec::new(),
        }
    }

    /// Tries so many damaged inputs in a usual run.
    #[must_use]
    pub fn cases(self, cases: u64) -> Self {
        Self { cases, ..self }
    }

    /// Damages these too, which have to be read: of a format that changes too often to be kept in the corpus.
    #[must_use]
    pub fn made(self, made: Vec<Vec<u8>>) -> Self {
        Self { made, ..self }
    }

    /// Puts such words into inputs.
    #[must_use]
    pub fn words(self, words: &'static [&'static [u8]]) -> Self {
        Self { words, ..self }
    }

    /// Makes the checksums of three in four damaged inputs right again, so that what is behind them is reached.
    #[must_use]
    pub fn sealed(self, seal: fn(&mut Vec<u8>)) -> Self {
        Self { seal, ..self }
    }

    /// Tries inputs of at most so many bytes.
    #[must_use]
    pub fn max_bytes(self, max_bytes: usize) -> Self {
        Self { max_bytes, ..self }
    }

    /// Allows a parser so long for an input, in place of two seconds.
    #[must_use]
    pub fn slowest(self, slowest: Duration) -> Self {
        Self { slowest, ..self }
    }

    /// Allows a parser to have `base` bytes allocated at once, and `per_byte` for each byte of its input.
    ///
    /// Allocations on the thread of the run count; [`crate::AllocationCounter`] must be the global allocator.
    #[must_use]
    pub fn memory(self, base: usize, per_byte: usize) -> Self {
        Self { memory: Some((base, per_byte)), ..self }
    }

    /// Tries the corpus, then damaged inputs.
    ///
    /// # Panics
    /// If the parser panics, or does not keep to its bounds, or if it refuses an input of the corpus whose name begins
    /// with `ok`.
    pub fn run(self, parser: impl FnMut(&[u8]) -> Verdict) {
        let seed = number("BATON_FUZZ_SEED").unwrap_or(1);
        let end = number("BATON_FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
        let begun = Instant::now();
        let mut trial = Trial::new(self, parser, seed);
        let mut pool = trial.corpus();
        let mut rng = Rng::fork(seed, pool.len() as u64);
        while end.map_or(trial.case < trial.fuzz.cases, |end| Instant::now() < end) {
            let from = pool[rng.below(pool.len() as u64) as usize].clone();
            let input = trial.damaged(from, &pool, &mut rng);
            let (verdict, new) = trial.try_one(&input);
            // Without instrumentation, what was read is taken for news.
            let kept = if trial.coverage.counts() { new } else { verdict == Verdict::Read };
            if kept && pool.len() < trial.at_most {
                pool.push(input);
            } else if kept {
                let at = trial.given + rng.below((pool.len() - trial.given) as u64) as usize;
                pool[at] = input;
            }
        }
        trial.end(begun.elapsed());
    }
}

/// The inputs in `corpus/NAME` with their names, in the order of these.
///
/// # Panics
/// If there are none.
#[must_use]
pub fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let read = |path: PathBuf| {
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), bytes)
    };
    let mut found: Vec<_> = entries.filter_map(|entry| Some(read(entry.ok()?.path()))).collect();
    found.sort();
    assert!(!found.is_empty(), "{}: no inputs", dir.display());
    found
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// A parser on trial.
struct Trial<F> {
    fuzz: Fuzz,
    parser: F,
    seed: u64,
    case: u64,
    read: u64,
    /// Inputs of the corpus.
    given: usize,
    at_most: usize,
    /// The longest that an input took, and the most memory.
    most: (Duration, usize),
    coverage: Coverage,
    /// File with the input under test, which survives the process.
    last: (PathBuf, File),
    /// The number that the watch looks at; it changes with every input.
    beat: Arc<AtomicU64>,
}

impl<F: FnMut(&[u8]) -> Verdict> Trial<F> {
    fn new(fuzz: Fuzz, parser: F, seed: u64) -> Self {
        assert!(
            fuzz.memory.is_none() || counting::counts(),
            "the test binary does not count what it allocates"
        );
        let dir = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz"),
            |dir| PathBuf::from(dir).join("fuzz"),
        );
        let path = dir.join(format!("{}.{}.last", fuzz.name, std::process::id()));
        let made = std::fs::create_dir_all(&dir).and_then(|()| File::create(&path));
        let file = made.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let beat = Arc::new(AtomicU64::new(0));
        watch(Arc::downgrade(&beat), path.clone());
        let (most, coverage, last) = ((Duration::ZERO, 0), Coverage::new(), (path, file));
        let (case, read, given, at_most) = (0, 0, 0, POOL);
        Self { fuzz, parser, seed, case, read, given, at_most, most, coverage, last, beat }
    }

    /// Tries the corpus as it is.
    fn corpus(&mut self) -> Vec<Vec<u8>> {
        let mut inputs = Vec::new();
        let made =
            std::mem::take(&mut self.fuzz.made).into_iter().map(|input| ("ok, just made".to_owned(), input));
        for (name, input) in corpus(self.fuzz.name).into_iter().chain(made) {
            let (verdict, _) = self.try_one(&input);
            assert!(
                verdict == Verdict::Read || !name.starts_with("ok"),
                "{}: the input {name} of the corpus is refused",
                self.fuzz.name
            );
            inputs.push(input);
        }
        assert!(self.read > 0, "{}: nothing of the corpus is read", self.fuzz.name);
        self.given = inputs.len();
        self.at_most = inputs.len() + POOL;
        (self.case, self.read) = (0, 0);
        inputs
    }

    fn damaged(&self, mut input: Vec<u8>, pool: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
        let mutator = Mutator { words: self.fuzz.words, max_bytes: self.fuzz.max_bytes };
        mutator.damage(&mut input, &pool[rng.below(pool.len() as u64) as usize], rng);
        if rng.below(4) > 0 {
            (self.fuzz.seal)(&mut input);
        }
        input
    }

    /// Tries one input; whether it was read, and whether a branch was taken that no other input took.
    fn try_one(&mut self, input: &[u8]) -> (Verdict, bool) {
        self.case += 1;
        self.beat.fetch_add(1, Ordering::Relaxed);
        let written =
            self.last.1.write_all_at(input, 0).and_then(|()| self.last.1.set_len(input.len() as u64));
        written.unwrap_or_else(|e| panic!("{}: {e}", self.last.0.display()));
        self.coverage.clear();
        let (verdict, mut took, bytes) = self.once(input);
        let new = self.coverage.take_in();
        // A machine that does something else meanwhile is no fault of the parser.
        for _ in 0..4 {
            if took > self.fuzz.slowest {
                took = took.min(self.once(input).1);
            }
        }
        if took > self.fuzz.slowest {
            self.fail(input, &format!("takes {took:?}, at most {:?}", self.fuzz.slowest));
        }
        if let Some((base, per_byte)) = self.fuzz.memory {
            let most = base + per_byte * input.len();
            if bytes > most {
                self.fail(input, &format!("has {bytes} bytes allocated at once, at most {most}"));
            }
        }
        self.most = (self.most.0.max(took), self.most.1.max(bytes));
        self.read += u64::from(verdict == Verdict::Read);
        (verdict, new)
    }

    fn once(&mut self, input: &[u8]) -> (Verdict, Duration, usize) {
        let start = Instant::now();
        let parser = AssertUnwindSafe(|| (self.parser)(input));
        match counting::measured(MEMORY_MAX, || catch_unwind(parser)) {
            (Ok(verdict), bytes) => (verdict, start.elapsed(), bytes),
            (Err(panic), _) => {
                self.keep(input, "panics");
                resume_unwind(panic)
            }
        }
    }

    fn fail(&self, input: &[u8], what: &str) {
        self.keep(input, what);
        panic!("{}: an input of {} bytes {what}", self.fuzz.name, input.len());
    }

    /// Writes an input to a file of its own.
    fn keep(&self, input: &[u8], what: &str) {
        let (name, seed, case) = (self.fuzz.name, self.seed, self.case);
        let path = self.last.0.with_file_name(format!("{name}-{seed}-{case}"));
        let kept =
            std::fs::write(&path, input).map_or_else(|e| e.to_string(), |()| path.display().to_string());
        let begins = input[..input.len().min(300)].escape_ascii();
        eprintln!(
            "fuzz {name}: BATON_FUZZ_SEED={seed}, case {case}: {what}; once repaired, put {kept} into \
             tests/fuzz/corpus/{name}; it begins with \"{begins}\""
        );
    }

    /// Says what was done.
    fn end(self, took: Duration) {
        let Self { fuzz, case, read, seed, most, coverage, .. } = self;
        let a_second = case as f64 / took.as_secs_f64();
        let branches =
            if coverage.counts() { format!(", {} branches", coverage.taken()) } else { String::new() };
        let mut out = std::io::stdout();
        let line = format!(
            "fuzz {}: {case} inputs of seed {seed} in {:.1} s ({a_second:.0} a second), {read} of them read; at most \
             {:?} and {} bytes each{branches}\n",
            fuzz.name,
            took.as_secs_f64(),
            most.0,
            most.1
        );
        drop(out.write_all(line.as_bytes()));
        drop(std::fs::remove_file(&self.last.0));
    }
}

/// Ends the process where the same input is tried for too long.
fn watch(beat: Weak<AtomicU64>, last: PathBuf) {
    let look = move || {
        let mut seen = (0, Instant::now());
        while let Some(beat) = beat.upgrade() {
            let now = beat.load(Ordering::Relaxed);
            drop(beat);
            if now != seen.0 {
                seen = (now, Instant::now());
            } else if now > 0 && seen.1.elapsed() > HANG {
                eprintln!("fuzz: {} has not been read for {HANG:?}", last.display());
                std::process::abort();
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    };
    drop(std::thread::Builder::new().name("fuzz watch".into()).spawn(look));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(name: &'static str) -> Fuzz {
        Fuzz::new(name).cases(3_000)
    }

    /// Numbers with commas in between.
    fn list(input: &[u8]) -> Verdict {
        let text = String::from_utf8_lossy(input);
        Verdict::of(&text.split(',').map(str::parse::<u8>).collect::<Result<Vec<u8>, _>>())
    }

    fn message(run: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("it finds something");
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).expect("a text")
    }

    #[test]
    fn a_sound_parser_passes_and_the_same_inputs_are_tried_again() {
        let tried = |seen: &mut Vec<Vec<u8>>| {
            small("numbers").run(|input| {
                seen.push(input.to_vec());
                list(input)
            });
        };
        let (mut one, mut other) = (Vec::new(), Vec::new());
        tried(&mut one);
        tried(&mut other);
        let same = one.iter().zip(&other).all(|(one, other)| one == other);
        assert!(same && one.len() >= 3_000);
        assert!(one.iter().filter(|input| list(input) == Verdict::Read).count() > 100);
    }

    #[test]
    fn a_panic_a_slow_input_and_a_greedy_one_are_found() {
        let found = message(|| {
            small("numbers").run(|input| {
                assert!(!input.windows(2).any(|at| at == b",,"), "two commas");
                list(input)
            });
        });
        assert!(found.contains("two commas"), "{found}");
        let slow = small("numbers").slowest(Duration::from_millis(5));
        let found = message(|| {
            slow.run(|input| {
                std::thread::sleep(Duration::from_millis(if input.len() > 500 { 50 } else { 0 }));
                list(input)
            });
        });
        assert!(found.contains("takes"), "{found}");
        let found = message(|| {
            small("numbers").memory(20_000, 200).run(|input| {
                drop(std::hint::black_box(vec![1_u8; input.len() * 2_000]));
                list(input)
            });
        });
        assert!(found.contains("allocated at once"), "{found}");
    }

    #[test]
    fn a_corpus_that_is_not_read_is_none() {
        assert!(message(|| small("numbers").run(|_| Verdict::Refused)).contains("is refused"));
        assert!(message(|| small("no such parser").run(list)).contains("no such parser"));
    }

    #[test]
    fn sums_are_made_right_again() {
        #[allow(clippy::ptr_arg, reason = "other formats change their length when they are sealed")]
        fn seal(input: &mut Vec<u8>) {
            let sum = input.iter().skip(1).fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
            if let Some(first) = input.first_mut() {
                *first = sum;
            }
        }
        let mut right = 0;
        small("numbers").sealed(seal).run(|input| {
            let mut sealed = input.to_vec();
            seal(&mut sealed);
            right += u64::from(sealed == input);
            Verdict::Read
        });
        assert!(right > 1_500, "{right}");
    }
}
