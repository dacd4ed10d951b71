//! `Store`, which `mooncake.store` makes a `MooncakeDistributedStore` of.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use super::log;
use crate::Failure;
use crate::raw::{Buffers, Span};
use crate::store::{Answer, GetMode, KEYS_MAX, PutValue};

const LOGGER: &str = "mooncake.store";
/// How long `unregister_buffer` waits for calls that use the buffer.
const USE_LIMIT: Duration = Duration::from_secs(65);
/// Between two lines about the same failure of the same kind of call.
const QUIET: Duration = Duration::from_secs(1);

/// A list for each key.
type NestedLists = Vec<Vec<u64>>;

/// Values by key.
#[pyclass(frozen, subclass, module = "mooncake.store")]
#[derive(Default)]
pub(super) struct Store {
    store: RwLock<Option<std::sync::Arc<crate::store::Store>>>,
    buffers: Buffers,
    /// When a kind of failure, by call and code, was said last.
    said: Mutex<BTreeMap<(&'static str, i32), Instant>>,
}

fn code(answer: &Answer) -> i64 {
    match answer {
        Ok(number) => i64::try_from(*number).unwrap_or(i64::MAX),
        Err(failure) => failure.code.into(),
    }
}

impl Store {
    fn opened(&self) -> Result<std::sync::Arc<crate::store::Store>, Failure> {
        let none = || Failure::new(Failure::ARGUMENT, "the store is not set up; call setup first");
        self.store.read().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(none)
    }

    /// Runs a call of the store without the interpreter's lock. It logs failures that are not mere misses: the first of
    /// each call, and at most a line a second of each kind.
    fn run(
        &self,
        py: Python<'_>,
        (verb, keys): (&'static str, usize),
        does: impl FnOnce(&crate::store::Store) -> Result<Vec<Answer>, Failure> + Send,
    ) -> Vec<i64> {
        let bounded = || {
            if keys > KEYS_MAX {
                return Err(Failure::new(Failure::ARGUMENT, format!("{keys} keys; give at most {KEYS_MAX}")));
            }
            does(&*self.opened()?)
        };
        let answers = py.detach(bounded).unwrap_or_else(|failure| vec![Err(failure); keys]);
        let failures = || answers.iter().filter_map(|answer| answer.as_ref().err());
        let told = || failures().filter(|failure| failure.code != Failure::ABSENT);
        if let Some(first) = told().next() {
            let text = format!("{verb}: {} of {keys} keys failed; the first: {first}", failures().count());
            self.warn(py, (verb, first.code), &text);
        }
        answers.iter().map(code).collect()
    }

    fn warn(&self, py: Python<'_>, kind: (&'static str, i32), text: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.get(&kind).is_none_or(|said| said.elapsed() >= QUIET) {
            // Few calls and few codes: it stays small.
            said.insert(kind, Instant::now());
            drop(said);
            log(py, LOGGER, "warning", text);
        }
    }

    /// The spans of every key, or the first thing that is wrong.
    fn spans(
        &self,
        keys: usize,
        addresses: &[Vec<u64>],
        sizes: &[Vec<u64>],
    ) -> Result<Vec<Vec<Span>>, Failure> {
        let wrong = |text: String| Failure::new(Failure::ARGUMENT, text);
        let even = addresses.iter().zip(sizes).all(|(addresses, sizes)| addresses.len() == sizes.len());
        if addresses.len() != keys || sizes.len() != keys || !even {
            return Err(wrong(
                "lists of different lengths; give each key its buffers, each buffer its size".into(),
            ));
        }
        let one = |(addresses, sizes): (&Vec<u64>, &Vec<u64>)| {
            let spans =
                addresses.iter().zip(sizes).map(|(address, bytes)| self.buffers.span(*address, *bytes));
            spans.collect::<Result<Vec<_>, _>>()
        };
        addresses.iter().zip(sizes).map(one).collect::<Result<_, _>>().map_err(wrong)
    }
}

#[pymethods]
impl Store {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Sets the store up over servers at `addresses`. 0, or below 0 with the reason in the log. Servers that do not
    /// answer yet are a warning: they are misses until they do.
    fn open(&self, py: Python<'_>, addresses: &str, tenant: &str) -> i32 {
        let opened = py.detach(|| {
            let store = crate::store::Store::open(addresses, tenant)?;
            let reachable = store.reachable();
            *self.store.write().unwrap_or_else(PoisonError::into_inner) = Some(std::sync::Arc::new(store));
            Ok::<_, Failure>(reachable)
        });
        match opened {
            Ok((answering, all)) if answering < all => {
                let text =
                    format!("setup: {answering} of {all} stores answer; the others are misses until they do");
                log(py, LOGGER, "warning", &text);
                0
            }
            Ok(_) => 0,
            Err(failure) => {
                log(py, LOGGER, "error", &failure.to_string());
                failure.code
            }
        }
    }

    /// Lets the store go. Calls under way end as they would have.
    fn close(&self) -> i32 {
        *self.store.write().unwrap_or_else(PoisonError::into_inner) = None;
        0
    }

    /// Registers memory that values come from and go to.
    #[allow(unsafe_code, reason = "addresses become memory; the promise is the engine's")]
    fn register_buffer(&self, py: Python<'_>, buffer_ptr: u64, size: u64) -> i32 {
        // SAFETY: docs/python.md asks it of the engine: memory stays mapped until it has been unregistered, and is
        // left alone while a call uses it.
        match unsafe { self.buffers.register(buffer_ptr, size) } {
            Ok(()) => 0,
            Err(text) => {
                log(py, LOGGER, "error", &format!("register_buffer: {text}"));
                Failure::ARGUMENT
            }
        }
    }

    /// Unregisters a buffer. After 0 no call uses it. Waits for the calls that use it, without the interpreter's lock,
    /// so that they can end.
    fn unregister_buffer(&self, py: Python<'_>, buffer_ptr: u64) -> i32 {
        match py.detach(|| self.buffers.unregister(buffer_ptr, USE_LIMIT)) {
            Ok(()) => 0,
            Err(failure) => {
                if failure.code == Failure::IN_USE {
                    log(py, LOGGER, "error", &failure.to_string());
                }
                failure.code
            }
        }
    }

    /// 1 or 0 for each key.
    fn batch_is_exist(&self, py: Python<'_>, keys: Vec<String>) -> Vec<i64> {
        let answers = |store: &crate::store::Store| {
            Ok(store.exist(&keys).into_iter().map(|found| Ok(u64::from(found))).collect())
        };
        // A store that was closed has nothing.
        self.run(py, ("batch_is_exist", keys.len()), answers).into_iter().map(|found| found.max(0)).collect()
    }

    /// Puts values from registered memory, several pieces each. 0 or below 0 for each key.
    fn put_spans(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        buffers: NestedLists,
        sizes: NestedLists,
    ) -> Vec<i64> {
        self.run(py, ("put", keys.len()), |store| {
            let spans = self.spans(keys.len(), &buffers, &sizes)?;
            Ok(store.put(&keys, &spans.into_iter().map(PutValue::Spans).collect::<Vec<_>>()))
        })
    }

    /// Gets values into registered memory, several pieces each. Bytes or below 0 for each key; a value that does not
    /// fill its pieces is a miss.
    fn get_spans(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        buffers: NestedLists,
        sizes: NestedLists,
    ) -> Vec<i64> {
        self.run(py, ("get", keys.len()), |store| {
            let spans = self.spans(keys.len(), &buffers, &sizes)?;
            Ok(store.get_into(&keys, &spans, GetMode::Exact))
        })
    }

    /// Gets values into pieces that may be longer than their value.
    fn get_into_larger(
        &self,
        py: Python<'_>,
        keys: Vec<String>,
        buffers: NestedLists,
        sizes: NestedLists,
    ) -> Vec<i64> {
        self.run(py, ("get", keys.len()), |store| {
            let spans = self.spans(keys.len(), &buffers, &sizes)?;
            Ok(store.get_into(&keys, &spans, GetMode::UpTo))
        })
    }

    /// Puts values that are bytes.
    fn batch_put(&self, py: Python<'_>, keys: Vec<String>, values: Vec<PyBackedBytes>) -> Vec<i64> {
        self.run(py, ("put", keys.len()), |store| {
            if values.len() != keys.len() {
                return Err(Failure::new(
                    Failure::ARGUMENT,
                    "lists of different lengths; give each key a value",
                ));
            }
            Ok(store.put(&keys, &values.iter().map(|value| PutValue::Bytes(value)).collect::<Vec<_>>()))
        })
    }

    /// Gets values as bytes; `None` for keys without.
    fn get_each<'py>(&self, py: Python<'py>, keys: Vec<String>) -> Vec<Option<Bound<'py, PyBytes>>> {
        let mut values = Vec::new();
        self.run(py, ("get", keys.len()), |store| {
            let got = store.get(&keys);
            let answers =
                got.iter().map(|got| got.as_ref().map(|value| value.len() as u64).map_err(Clone::clone));
            let answers = answers.collect();
            values = got;
            Ok(answers)
        });
        let mut values: Vec<_> =
            values.into_iter().map(|value| value.ok().map(|value| PyBytes::new(py, &value))).collect();
        values.resize(keys.len(), None);
        values
    }

    /// How long values are; below 0 for keys without.
    fn batch_get_size(&self, py: Python<'_>, keys: Vec<String>) -> Vec<i64> {
        self.run(py, ("get_size", keys.len()), |store| Ok(store.sizes(&keys)))
    }

    /// Removes values; 0, or below 0 for keys without.
    fn remove_each(&self, py: Python<'_>, keys: Vec<String>) -> Vec<i64> {
        self.run(py, ("remove", keys.len()), |store| Ok(store.remove(&keys)))
    }

    /// Removes everything; how much that was, or below 0.
    fn clear(&self, py: Python<'_>) -> i64 {
        self.run(py, ("remove_all", 1), |store| Ok(vec![store.remove_all()])).first().copied().unwrap_or(-1)
    }

    /// 0 when every server answers, else below 0.
    fn health_check(&self, py: Python<'_>) -> i64 {
        let looked = self.run(py, ("health_check", 1), |store| {
            let (answering, all) = store.reachable();
            let text = format!("{answering} of {all} stores answer");
            Ok(vec![if answering == all { Ok(0) } else { Err(Failure::new(Failure::SERVER, text)) }])
        });
        looked.first().copied().unwrap_or(-1)
    }
}
