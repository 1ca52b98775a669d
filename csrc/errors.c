/* errors.c - names and texts of the codes in radixshm.h. */
#include "radixshm.h"

#define NAME_CASE(name, value, text) case name: return #name;
#define TEXT_CASE(name, value, text) case name: return text;

const char *rs_error_name(int code)
{
    switch (code) {
        RS_ERRORS(NAME_CASE)
    default:
        return "RS_E?";
    }
}

const char *rs_error_text(int code)
{
    switch (code) {
        RS_ERRORS(TEXT_CASE)
    default:
        return "unknown error code";
    }
}
