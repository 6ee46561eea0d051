/*
 * postgresql.c - PostgreSQL's advisory locks: a number of 64 bits that a session
 * locks until it unlocks it or ends. Both statements are prepared.
 *
 *   postgresql CONNINFO
 */
#include "client.h"

#include <libpq-fe.h>
#include <stdio.h>
#include <string.h>

static PGconn *connection;
static char number[16];

void client_open(int argc, char **argv)
{
    static const char *const statement[] = { "SELECT pg_advisory_lock($1)", "SELECT pg_advisory_unlock($1)" };
    static const char *const called[] = { "take", "give" };

    connection = PQconnectdb(argc > 0 ? argv[0] : "");
    if (PQstatus(connection) != CONNECTION_OK)
        client_die("PQconnectdb", PQerrorMessage(connection));
    for (int i = 0; i < 2; i++) {
        PGresult *result = PQprepare(connection, called[i], statement[i], 1, NULL);
        if (PQresultStatus(result) != PGRES_COMMAND_OK)
            client_die(statement[i], PQerrorMessage(connection));
        PQclear(result);
    }
}

/* Executes; the answer of one row must be `expected`. */
static void execute(const char *statement, const char *expected)
{
    const char *values[] = { number };
    PGresult *result = PQexecPrepared(connection, statement, 1, values, NULL, NULL, 0);
    if (PQresultStatus(result) != PGRES_TUPLES_OK)
        client_die(statement, PQerrorMessage(connection));
    if (strcmp(PQgetvalue(result, 0, 0), expected))
        client_die(statement, "not what was expected");
    PQclear(result);
}

void client_take(unsigned name)
{
    snprintf(number, sizeof number, "%u", name);
    execute("take", "");                  /* void */
}

void client_give(void)
{
    execute("give", "t");
}
