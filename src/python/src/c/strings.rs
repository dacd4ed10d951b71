//! Strings and lists that cross the border.

use std::ffi::{CStr, CString, c_char, c_int};

use super::NotifyMsg;
use crate::engine::Note;

/// A string that came in; none for null.
///
/// # Safety
/// It is null or ends with a zero byte.
pub(super) unsafe fn text(from: *const c_char) -> Option<String> {
    if from.is_null() {
        return None;
    }
    // SAFETY: the caller's promise. It is copied at once.
    Some(unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned())
}

/// Writes a string and its zero byte; false when they do not fit.
///
/// # Safety
/// There are so many bytes.
pub(super) unsafe fn put(text: &str, into: *mut c_char, bytes: usize) -> bool {
    if into.is_null() || bytes <= text.len() {
        return false;
    }
    // SAFETY: the caller's promise; there is room for the text and one byte more (just checked).
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), into.cast(), text.len());
        into.add(text.len()).write(0);
    }
    true
}

/// A list that came in; empty for null.
///
/// # Safety
/// There are `count` of them, and nobody changes them meanwhile.
pub(super) unsafe fn list<'a, T>(from: *const T, count: usize) -> &'a [T] {
    if from.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(from, count) }
}

/// A notice that came in.
///
/// # Safety
/// Its strings are null or end with a zero byte.
pub(super) unsafe fn note(from: NotifyMsg) -> Note {
    // SAFETY: the caller's promise.
    let (name, msg) = unsafe { (text(from.name), text(from.msg)) };
    Note { name: name.unwrap_or_default(), msg: msg.unwrap_or_default() }
}

/// Notices that go out, and how many; null for none.
pub(super) fn give(notes: Vec<Note>) -> (*mut NotifyMsg, c_int) {
    // A zero byte ends a string in C: what follows it is not carried over.
    let out = |text: String| {
        CString::new(text.split('\0').next().unwrap_or_default()).expect("no zero byte").into_raw()
    };
    let list: Vec<_> =
        notes.into_iter().map(|note| NotifyMsg { name: out(note.name), msg: out(note.msg) }).collect();
    let count = c_int::try_from(list.len()).expect("the inbox is bounded");
    if list.is_empty() {
        return (std::ptr::null_mut(), 0);
    }
    (Box::into_raw(list.into_boxed_slice()).cast(), count)
}

/// Takes back what [`give`] gave.
///
/// # Safety
/// `list` is a list from [`give`], with its count, and no longer in use.
pub(super) unsafe fn take_back(list: *mut NotifyMsg, count: c_int) {
    let Some(count) = usize::try_from(count).ok().filter(|count| *count > 0 && !list.is_null()) else {
        return;
    };
    // SAFETY: a boxed slice of that many, made in `give`, as are the strings in it.
    for note in unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, count)) } {
        // SAFETY: as above.
        drop(unsafe { (CString::from_raw(note.name), CString::from_raw(note.msg)) });
    }
}
