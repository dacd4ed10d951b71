//! What can go wrong with a device, each with its remedy.

use std::fmt;
use std::path::PathBuf;

/// Why something about a device failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceFault {
    /// The driver's library could not be loaded.
    NoDriver {
        /// What was looked for.
        library: PathBuf,
        /// What the loader said.
        why: String,
    },
    /// The library lacks a function that is needed: it is too old, or no CUDA driver.
    MissingSymbol {
        /// Which library.
        library: PathBuf,
        /// Which function.
        symbol: &'static str,
    },
    /// A call of the driver failed, or reported that an earlier one has.
    Cuda {
        /// Which call.
        call: &'static str,
        /// The driver's number of the error.
        code: i32,
        /// The driver's name of it, as `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The driver's sentence on it.
        text: String,
    },
    /// There are not so many devices.
    NoDevice {
        /// Which was asked for, counted from 0.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A range is not inside its memory, or is empty.
    Outside {
        /// Its length.
        bytes: u64,
        /// Its first byte.
        at: u64,
        /// What there is.
        held_bytes: u64,
    },
    /// What was asked for does not fit together; the sentence says what does.
    Unfit(&'static str),
}

impl fmt::Display for DeviceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver { library, why } => {
                let library = library.display();
                write!(
                    f,
                    "no CUDA driver here: {library} not found; install the GPU's driver or do without \
                           device memory ({why})"
                )
            }
            Self::MissingSymbol { library, symbol } => {
                let library = library.display();
                write!(
                    f,
                    "{library} has no {symbol}: not a CUDA driver, or one too old; install version 11 or later"
                )
            }
            Self::Cuda { call, code, name, text } => {
                write!(f, "{call} failed with {name} ({code}): {text}; {}", remedy(*code))
            }
            Self::NoDevice { ordinal, count } => {
                write!(f, "no device {ordinal}: there are {count}, counted from 0; see CUDA_VISIBLE_DEVICES")
            }
            Self::Outside { bytes, at, held_bytes } => {
                write!(f, "{bytes} bytes at {at} are no range of a memory of {held_bytes} bytes")
            }
            Self::Unfit(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for DeviceFault {}

/// What to do about an error of the driver, by its number.
fn remedy(code: i32) -> &'static str {
    match code {
        1 => "a range or an alignment that the driver does not take",
        2 => "free device memory, or lower what is reserved for KV",
        100 => "no device is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
        304 => "raise the limit of locked memory (ulimit -l)",
        712 => "the memory is pinned already; pin it once and share that",
        801 => "this driver or device cannot do it; go by host memory",
        _ => "see the driver's log (dmesg); a context that failed once stays so until the process ends",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_names_its_remedy() {
        let none = DeviceFault::NoDriver { library: "libcuda.so.1".into(), why: "no such file".into() };
        assert!(none.to_string().starts_with("no CUDA driver here: libcuda.so.1 not found; install"));
        let full = DeviceFault::Cuda {
            call: "cuMemAlloc_v2",
            code: 2,
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
            text: "out of memory".into(),
        };
        let said = full.to_string();
        assert!(said.contains("cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY (2)"), "{said}");
        assert!(said.ends_with("lower what is reserved for KV"), "{said}");
        assert!(DeviceFault::NoDevice { ordinal: 3, count: 2 }.to_string().contains("there are 2"));
    }
}
