// What `ik_llama_adapter.py` calls of ik_llama.cpp. Compiled against the headers of the user's own
// source folder: their structures differ from llama.cpp's, and from one version to the next.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

namespace {

struct Engine {
    llama_model * model = nullptr;
    llama_context * context = nullptr;
    int threads = 0;
    int sequences = 0;
    int length = 0; // tokens of a sequence
};

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// An empty context for some sequences of at most so many tokens.
bool prepare(Engine & e, int sequences, int length) {
    if (!e.context || sequences != e.sequences || length > e.length) {
        if (e.context) llama_free(e.context);
        llama_context_params params = llama_context_default_params();
        e.sequences = sequences;
        e.length = (length + 255) / 256 * 256;
        params.n_ctx = e.length * sequences;
        params.n_batch = std::max(e.length, std::max(sequences, 512));
        params.n_ubatch = 512;
        params.n_seq_max = sequences;
        params.n_threads = params.n_threads_batch = e.threads;
        params.flash_attn = true;
        e.context = llama_init_from_model(e.model, params);
    }
    if (e.context) llama_kv_cache_clear(e.context);
    return e.context != nullptr;
}

// One call for all pieces, at `position` of the sequences from `first` on; the next tokens.
int decode(Engine & e, llama_batch & batch, const int * tokens, int pieces, int length, int position,
           int first, int * next) {
    batch.n_tokens = pieces * length;
    for (int i = 0; i < batch.n_tokens; ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = position + i % length;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = first + i / length;
        batch.logits[i] = i % length == length - 1;
    }
    if (int status = llama_decode(e.context, batch)) return status;
    const int vocabulary = llama_n_vocab(e.model);
    for (int i = 0; i < pieces; ++i) {
        const float * logits = llama_get_logits_ith(e.context, (i + 1) * length - 1);
        next[i] = int(std::max_element(logits, logits + vocabulary) - logits);
    }
    return 0;
}

} // namespace

extern "C" {

// A loaded model, or null. The log is silent, or nothing else could be read there.
void * ik_load(const char * path, int threads) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    auto * engine = new Engine;
    engine->threads = threads;
    engine->model = llama_model_load_from_file(path, llama_model_default_params());
    return engine->model ? engine : nullptr;
}

void ik_describe(void * handle, char * text, int size) {
    llama_model_desc(static_cast<Engine *>(handle)->model, text, size);
}

const char * ik_system() { return llama_print_system_info(); }

// `count` new tokens for each of some prompts of one length; seconds until each step was over.
int ik_generate(void * handle, const int * prompts, int requests, int length, int count, int * last,
                double * ends) {
    Engine & e = *static_cast<Engine *>(handle);
    if (!prepare(e, requests, length + count)) return -1;
    const int group = std::max(1, 512 / length); // prompts of a call, as for llama.cpp
    llama_batch batch = llama_batch_init(std::max(group * length, requests), 0, 1);
    int status = 0;
    const double began = now();
    for (int first = 0; first < requests && !status; first += group)
        status = decode(e, batch, prompts + first * length, std::min(group, requests - first), length,
                        0, first, last + first);
    ends[0] = now() - began;
    for (int step = 1; step < count && !status; ++step) {
        status = decode(e, batch, last, requests, 1, length + step - 1, 0, last);
        ends[step] = now() - began;
    }
    llama_batch_free(batch);
    return status;
}

} // extern "C"
