mod inference_budget;
mod inference_cache;
mod inference_faults;
mod inference_support;
mod inference_wire;
