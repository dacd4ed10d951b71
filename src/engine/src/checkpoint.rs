//! Hugging Face folders: `config.json` and safetensors files, one or several with an index.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::BuildError;
use crate::config::ModelConfig;
use crate::weights::{Source, Weights};

/// The content of a model's folder.
#[derive(Debug)]
pub(crate) struct LoadedModel {
    /// The folder's own name.
    pub(crate) name: String,
    /// The model.
    pub(crate) weights: Weights,
    /// The tokens that end an answer.
    pub(crate) end_tokens: Vec<u32>,
}

/// Reads a folder.
///
/// # Errors
/// Names the file, and in it the field or tensor, that is missing, broken or unsupported.
pub(crate) fn load(folder: &Path) -> Result<LoadedModel, BuildError> {
    let json = read_json(&folder.join("config.json"))?;
    let config = ModelConfig::read(&json)?;
    let mut end_tokens = end_tokens(&json);
    let generation = folder.join("generation_config.json");
    if generation.exists() {
        end_tokens.extend(self::end_tokens(&read_json(&generation)?));
    }
    end_tokens.sort_unstable();
    end_tokens.dedup();
    let mut shards = Shards::open(folder)?;
    let weights = Weights::collect(config, &mut shards)?;
    let absolute = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
    let name =
        absolute.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    Ok(LoadedModel { name, weights, end_tokens })
}

fn failed(path: &Path, what: &dyn std::fmt::Display) -> BuildError {
    BuildError(format!("checkpoint {}: {what}", path.display()))
}

fn read_json(path: &Path) -> Result<Value, BuildError> {
    let remedy = "give the folder of a model in Hugging Face's form";
    let text = std::fs::read(path).map_err(|e| failed(path, &format!("{e}; {remedy}")))?;
    serde_json::from_slice(&text).map_err(|e| failed(path, &e))
}

/// One end token or a list of them.
fn end_tokens(json: &Value) -> Vec<u32> {
    let listed = match &json["eos_token_id"] {
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    listed.iter().filter_map(|n| n.as_u64().and_then(|n| u32::try_from(n).ok())).collect()
}

/// The files of a checkpoint; the one used last stays in memory.
struct Shards {
    /// Which file holds a tensor; empty if there is one file.
    index: BTreeMap<String, PathBuf>,
    single: PathBuf,
    index_at: PathBuf,
    open: Option<(PathBuf, Vec<u8>)>,
}

impl Shards {
    fn open(folder: &Path) -> Result<Self, BuildError> {
        let single = folder.join("model.safetensors");
        let index_at = folder.join("model.safetensors.index.json");
        let mut index = BTreeMap::new();
        if !single.exists() {
            let json = read_json(&index_at)?;
            let map = json["weight_map"].as_object();
            for (tensor, file) in map.ok_or_else(|| failed(&index_at, &"weight_map is missing"))? {
                let file = file.as_str().filter(|file| !file.contains(['/', '\\']));
                let file = file.ok_or_else(|| failed(&index_at, &format!("{tensor} names no file here")))?;
                index.insert(tensor.clone(), folder.join(file));
            }
        }
        Ok(Self { index, single, index_at, open: None })
    }

    fn file_of(&self, name: &str) -> Result<PathBuf, BuildError> {
        if self.index.is_empty() {
            return Ok(self.single.clone());
        }
        let file = self.index.get(name).cloned();
        file.ok_or_else(|| failed(&self.index_at, &format!("it has no tensor {name}")))
    }
}

impl Source for Shards {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, BuildError> {
        let path = self.file_of(name)?;
        if self.open.as_ref().is_none_or(|(open, _)| *open != path) {
            self.open = None;
            let bytes = std::fs::read(&path).map_err(|e| failed(&path, &e))?;
            self.open = Some((path.clone(), bytes));
        }
        let (_, bytes) = self.open.as_ref().expect("opened above");
        let file = SafeTensors::deserialize(bytes);
        let file =
            file.map_err(|e| failed(&path, &format!("{e}; fetch it again, it is damaged or not whole")))?;
        let tensor = file.tensor(name).map_err(|e| failed(&path, &format!("tensor {name}: {e}")))?;
        if tensor.shape() != shape {
            let what =
                format!("tensor {name} has shape {:?}, config.json asks for {shape:?}", tensor.shape());
            return Err(failed(&path, &what));
        }
        numbers(tensor.dtype(), tensor.data()).ok_or_else(|| {
            let what = format!("tensor {name} is {:?}; only F32, F16 and BF16 are supported", tensor.dtype());
            failed(&path, &what)
        })
    }
}

/// Little-endian numbers of a supported type.
fn numbers(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let pairs = bytes.as_chunks::<2>().0.iter();
    match dtype {
        Dtype::F32 => Some(bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect()),
        Dtype::F16 => Some(pairs.map(|two| half::f16::from_le_bytes(*two).to_f32()).collect()),
        Dtype::BF16 => Some(pairs.map(|two| half::bf16::from_le_bytes(*two).to_f32()).collect()),
        _ => None,
    }
}
