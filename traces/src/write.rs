//! Writing traces: canonical Mooncake JSON lines, and CSV for simulators that want lengths only.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::{RowFault, Stage, TraceError};
use crate::record::{Extra, Record};
use crate::seen::IdMap;

/// Output formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// JSON lines with everything the record knows; also what agentic readers take.
    Mooncake,
    /// Vidur CSV: arrival and lengths.
    VidurCsv,
    /// splitwise-sim CSV: arrival and lengths.
    SplitwiseCsv,
    /// BurstGPT CSV: arrival and lengths.
    BurstGptCsv,
}

impl Output {
    /// The fields of a record that the format cannot express, if any.
    #[must_use]
    pub fn loses(self) -> Option<&'static str> {
        match self {
            Self::Mooncake => None,
            _ => Some("block ids, sessions and all other fields have no column and are not written"),
        }
    }
}

impl FromStr for Output {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "mooncake" => Ok(Self::Mooncake),
            "vidur-csv" => Ok(Self::VidurCsv),
            "splitwise-csv" => Ok(Self::SplitwiseCsv),
            "burstgpt-csv" => Ok(Self::BurstGptCsv),
            _ => Err(format!(
                "{text:?} cannot be written; choose one of mooncake, vidur-csv, splitwise-csv, burstgpt-csv"
            )),
        }
    }
}

/// A number without a point where it is whole, as trace files have it.
#[derive(Serialize)]
#[serde(untagged)]
enum Milliseconds {
    Whole(i64),
    Fraction(f64),
}

#[expect(clippy::cast_possible_truncation, reason = "checked to be whole and small")]
fn milliseconds(value: f64) -> Milliseconds {
    if value.fract() == 0.0 && value.abs() < 9e15 {
        Milliseconds::Whole(value as i64)
    } else {
        Milliseconds::Fraction(value)
    }
}

#[derive(Serialize)]
struct PlainRow<'a> {
    timestamp: Milliseconds,
    input_length: u64,
    output_length: u64,
    hash_ids: &'a [u64],
}

#[derive(Serialize)]
struct FullRow<'a> {
    #[serde(flatten)]
    plain: PlainRow<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay: Option<Milliseconds>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict_priority: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lora: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    salt: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slo_ttft_ms: Option<Milliseconds>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slo_tbt_ms: Option<Milliseconds>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cancel_after_ms: Option<Milliseconds>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: &'a Option<String>,
    #[serde(skip_serializing_if = "slice_is_empty")]
    wait_for: &'a [String],
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

fn slice_is_empty(slice: &[String]) -> bool {
    slice.is_empty()
}

/// Names that a field passed on must not take.
const OWN_NAMES: [&str; 17] = [
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "request_id",
    "session_id",
    "delay",
    "priority",
    "strict_priority",
    "class",
    "tenant",
    "lora",
    "salt",
    "slo_ttft_ms",
    "slo_tbt_ms",
    "cancel_after_ms",
    "parent",
];

fn full_row<'a>(plain: PlainRow<'a>, extra: &'a Extra) -> FullRow<'a> {
    let passed_on = extra.unknown.iter().map(|(name, value)| {
        let taken = OWN_NAMES.contains(&name.as_str()) || name == "wait_for";
        (if taken { format!("original_{name}") } else { name.clone() }, value.clone())
    });
    FullRow {
        plain,
        request_id: &extra.request_id,
        session_id: &extra.session_id,
        delay: extra.delay_ms.map(milliseconds),
        priority: extra.priority,
        strict_priority: extra.strict_priority,
        class: &extra.class,
        tenant: &extra.tenant,
        lora: &extra.lora,
        salt: &extra.salt,
        slo_ttft_ms: extra.slo_ttft_ms.map(milliseconds),
        slo_tbt_ms: extra.slo_tbt_ms.map(milliseconds),
        cancel_after_ms: extra.cancel_after_ms.map(milliseconds),
        parent: &extra.parent,
        wait_for: &extra.wait_for,
        unknown: passed_on.collect(),
    }
}

/// Writes records one after another.
pub struct Writer<W: Write> {
    inner: W,
    output: Output,
    /// New ids in order of first appearance, where ids are renumbered.
    renumbered: Option<IdMap<u64>>,
    rows: u64,
}

impl<W: Write> Writer<W> {
    /// A writer onto `inner`. With `renumber`, block ids become 0, 1, 2, ... in order of appearance
    /// (for readers that hold them in 32 bits); that takes memory for every distinct id.
    pub fn new(inner: W, output: Output, renumber: bool) -> Self {
        Self { inner, output, renumbered: renumber.then(IdMap::default), rows: 0 }
    }

    /// Writes one record.
    pub fn write(&mut self, record: &Record) -> io::Result<()> {
        self.rows += 1;
        let seconds = record.timestamp_ms / 1000.0;
        let (input, output) = (record.input_length, record.output_length);
        match self.output {
            Output::Mooncake => self.write_json(record),
            Output::VidurCsv => {
                self.header("arrived_at,num_prefill_tokens,num_decode_tokens")?;
                writeln!(self.inner, "{seconds},{input},{output}")
            }
            Output::SplitwiseCsv => {
                self.header("request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size")?;
                writeln!(self.inner, "{},2,0,{seconds},1,{input},{output}", self.rows - 1)
            }
            Output::BurstGptCsv => {
                self.header("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type")?;
                writeln!(self.inner, "{seconds},unknown,{input},{output},{},Conversation log", input + output)
            }
        }
    }

    fn header(&mut self, header: &str) -> io::Result<()> {
        if self.rows == 1 { writeln!(self.inner, "{header}") } else { Ok(()) }
    }

    fn write_json(&mut self, record: &Record) -> io::Result<()> {
        let renumbered: Option<Vec<u64>> = self.renumbered.as_mut().map(|known| {
            record
                .hash_ids
                .iter()
                .map(|&id| {
                    let next = known.len() as u64;
                    *known.entry(id).or_insert(next)
                })
                .collect()
        });
        let plain = PlainRow {
            timestamp: milliseconds(record.timestamp_ms),
            input_length: record.input_length,
            output_length: record.output_length,
            hash_ids: renumbered.as_deref().unwrap_or(&record.hash_ids),
        };
        match &record.extra {
            None => serde_json::to_writer(&mut self.inner, &plain)?,
            Some(extra) => serde_json::to_writer(&mut self.inner, &full_row(plain, extra))?,
        }
        self.inner.write_all(b"\n")
    }

    /// Flushes and gives the inner writer back.
    pub fn finish(mut self) -> io::Result<W> {
        self.inner.flush()?;
        Ok(self.inner)
    }
}

enum Sink {
    Plain(BufWriter<File>),
    Gzip(GzEncoder<BufWriter<File>>),
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(file) => file.write(bytes),
            Self::Gzip(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(file) => file.flush(),
            Self::Gzip(file) => file.flush(),
        }
    }
}

/// Writes a file that appears under its name only once it is whole: a failure on the way leaves
/// what was there before untouched. A pipe or device is written to as it is, and a link keeps pointing where it does.
pub struct FileWriter {
    writer: Option<Writer<Sink>>,
    path: PathBuf,
    /// The temporary file and the place that it takes at the end.
    rename: Option<(PathBuf, PathBuf)>,
}

/// Starts writing the file `path`; gzip where its name ends in `.gz`.
pub fn create(path: &Path, output: Output, renumber: bool) -> Result<FileWriter, TraceError> {
    let rename = temporary(path).map_err(|error| write_error(path, &error))?;
    let target = rename.as_ref().map_or(path, |(partial, _)| partial.as_path());
    let file = File::create(target).map_err(|error| write_error(path, &error))?;
    let file = BufWriter::with_capacity(1 << 18, file);
    let sink = if path.extension().is_some_and(|extension| extension == "gz") {
        Sink::Gzip(GzEncoder::new(file, Compression::fast()))
    } else {
        Sink::Plain(file)
    };
    Ok(FileWriter { writer: Some(Writer::new(sink, output, renumber)), path: path.to_path_buf(), rename })
}

/// The temporary file to write and the file that it becomes; none where a rename would replace a device, a pipe or a
/// link by a file.
fn temporary(path: &Path) -> io::Result<Option<(PathBuf, PathBuf)>> {
    let whole = match std::fs::metadata(path) {
        Ok(there) if there.is_file() => std::fs::canonicalize(path)?,
        Err(_) if !path.is_symlink() => path.to_path_buf(),
        _ => return Ok(None),
    };
    let mut name = whole.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}", std::process::id()));
    Ok(Some((whole.with_file_name(name), whole)))
}

fn write_error(path: &Path, error: &io::Error) -> TraceError {
    RowFault::new(Stage::Write, "write", error.to_string(), "check the directory and the free space")
        .at(path, None)
}

impl FileWriter {
    /// Writes one record.
    pub fn write(&mut self, record: &Record) -> Result<(), TraceError> {
        match &mut self.writer {
            Some(writer) => writer.write(record).map_err(|error| write_error(&self.path, &error)),
            None => Ok(()),
        }
    }

    /// Completes the file and gives it its name.
    pub fn finish(mut self) -> Result<(), TraceError> {
        let outcome = self.complete();
        outcome.map_err(|error| write_error(&self.path, &error))
    }

    fn complete(&mut self) -> io::Result<()> {
        let Some(writer) = self.writer.take() else {
            return Ok(());
        };
        let mut file = match writer.finish()? {
            Sink::Plain(file) => file,
            Sink::Gzip(encoder) => encoder.finish()?,
        };
        file.flush()?;
        drop(file);
        self.rename.as_ref().map_or(Ok(()), |(partial, whole)| std::fs::rename(partial, whole))
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if let Some((partial, _)) = &self.rename {
            // After a rename there is nothing left to remove, and that is no error.
            let _ = std::fs::remove_file(partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_are_replaced_and_links_stay() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let (file, link, fresh) =
            (place.path().join("a.jsonl"), place.path().join("link"), place.path().join("b"));
        std::os::unix::fs::symlink("a.jsonl", &link).expect("a link");
        assert_eq!(temporary(&link).expect("a link to nothing"), None, "written through the link");
        std::fs::write(&file, "old").expect("written");
        let (partial, whole) = temporary(&link).expect("a link to a file").expect("replaced in one step");
        assert_eq!(whole.file_name(), file.file_name());
        assert!(partial.to_string_lossy().contains("a.jsonl.partial-"), "{}", partial.display());
        assert!(temporary(&fresh).expect("no file yet").is_some_and(|(_, whole)| whole == fresh));
        assert_eq!(temporary(Path::new("/dev/null")).expect("a device"), None);
        create(&link, Output::Mooncake, false).and_then(FileWriter::finish).expect("an empty trace");
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_to_string(&file).expect("replaced"), "");
    }
}
